"""Devices to processes: every device once, in equal shares, or one sentence."""

import socket

import pytest

from parallel import places
from parallel.choice import DeviceError
from parallel.job import Job, JobError, LaunchError
from parallel.places import local_places, place_in

EIGHT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Call it with the number of GPUs that the machine has; none unless called."""

    def have(count: int) -> None:
        monkeypatch.setattr(places, "_gpu_files", lambda: [f"/dev/nvidia{i}" for i in range(count)])

    have(0)
    return have


def shares(found: list) -> list[str]:
    return [place.environ.get("CUDA_VISIBLE_DEVICES") for place in found]


@pytest.mark.parametrize(
    "processes, environ, flags, expected",
    [
        ("auto", {}, {}, ["0", "1", "2", "3"]),
        ("2", {}, {}, ["0,1", "2,3"]),
        ("4", {}, {}, ["0", "1", "2", "3"]),
        ("2", {"CUDA_VISIBLE_DEVICES": "3, 1"}, {}, ["3", "1"]),
        ("auto", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,-1,GPU-c"}, {}, ["GPU-a", "GPU-b"]),
        ("2", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"gpus": "2,0"}, ["6", "4"]),
        ("auto", {}, {"gpus": "3,1,0"}, ["3", "1", "0"]),
        ("auto", {}, {"num_devices": 2}, ["0", "1"]),
        ("1", {}, {}, []),
        ("auto", {}, {"num_devices": 1}, []),
        ("2", {"JAX_PLATFORMS": "cuda"}, {}, ["0,1", "2,3"]),
        ("2", {"JAX_PLATFORMS": "cpu"}, {}, [None, None]),
        ("2", {"CUDA_VISIBLE_DEVICES": ""}, {}, [None, None]),
    ],
)
def test_visible_gpus_are_divided_evenly_and_in_order(gpus, processes, environ, flags, expected):
    gpus(4)
    assert shares(local_places(processes, environ, **flags)) == expected


@pytest.mark.parametrize(
    "processes, environ, flags, expected",
    [
        ("2", EIGHT, {}, [None, None]),  # each has all eight
        ("auto", EIGHT, {}, ["1"] * 8),
        ("auto", EIGHT, {"num_devices": 3}, ["1"] * 3),
        ("auto", {**EIGHT, "JAX_NUM_CPU_DEVICES": "2"}, {}, ["1", "1"]),
        ("auto", {"XLA_FLAGS": f"{EIGHT['XLA_FLAGS']} {EIGHT['XLA_FLAGS'][:-1]}3"}, {}, ["1"] * 3),
        ("2", EIGHT, {"num_devices": 4}, ["2", "2"]),
        ("2", EIGHT, {"gpus": "0,9"}, ["1", "1"]),
        ("auto", {}, {}, []),
        ("3", {}, {}, [None] * 3),
    ],
)
def test_a_cpu_simulates_as_many_devices_as_are_asked_for(processes, environ, flags, expected):
    found = local_places(processes, environ, **flags)
    assert [place.environ.get("JAX_NUM_CPU_DEVICES") for place in found] == expected


def test_the_processes_of_one_host_are_one_job_and_only_the_first_is_shown():
    found = local_places("3", EIGHT)
    coordinator = found[0].job.coordinator
    assert [place.job for place in found] == [Job("local", 3, i, coordinator, i, 3) for i in range(3)]
    assert coordinator is not None and coordinator.startswith("127.0.0.1:")
    assert [place.stderr_shown for place in found] == [True, False, False]


@pytest.mark.parametrize(
    "processes, environ, flags, words",
    [
        ("3", {}, {}, "4 devices do not divide over 3 processes: start 1, 2 or 4 of them, or type --num_devices 3"),
        ("8", {}, {}, "4 devices do not divide over 8 processes: start 1, 2 or 4 of them"),
        ("2", {}, {"num_devices": 1}, "1 device does not divide over 2 processes: start 1 of them"),
        ("2", {}, {"gpus": "0,4"}, "--gpus 0,4: there is no device 4, the visible devices are 0 to 3"),
        ("2", {}, {"gpus": "1,1"}, "named twice"),
        ("2", {}, {"gpus": "0,1", "num_devices": 1}, "--num_devices 1 contradicts the 2 of --gpus"),
        ("2", {}, {"num_devices": 5}, "--num_devices 5: 4 devices visible"),
        ("auto", {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "-1"}, {}, "no GPU is visible"),
        ("2", {**EIGHT}, {"num_devices": 3}, "3 devices do not divide over 2 processes"),
        ("2", {"JAX_PLATFORMS": "tpu"}, {}, "one process has all the TPU chips of a host"),
    ],
)
def test_numbers_that_do_not_fit_are_a_mistake(gpus, processes, environ, flags, words):
    gpus(4)
    with pytest.raises((JobError, DeviceError), match=r"^[^\n]*$") as raised:
        local_places(processes, environ, **flags)
    assert str(raised.value).startswith(words) or words in str(raised.value)


def test_a_port_that_is_given_is_taken_or_named_as_taken():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.listen()
        with pytest.raises(LaunchError, match=f"port {port} is taken"):
            local_places("2", EIGHT, port=port)
    assert local_places("2", EIGHT, port=port)[1].job.coordinator == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "local_index, local_count, environ, flags, expected",
    [
        (1, 2, {}, {}, "2,3"),
        (1, 4, {}, {}, "1"),
        (1, 2, {}, {"gpus": "3,0"}, "0"),
        (1, 3, {}, {"num_devices": 3}, "1"),
        (2, None, {}, {}, "2"),  # torch's way: a GPU each
        (0, 1, {}, {"gpus": "3"}, None),  # alone on its host, where jax narrows down
        (1, 2, {"CUDA_VISIBLE_DEVICES": "1"}, {}, None),  # bound by the launcher
        (1, 2, {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, {}, None),
        (1, 2, {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}, {}, "1"),
        (1, 2, {"JAX_PLATFORMS": "cpu"}, {"num_devices": 3}, None),
    ],
)
def test_a_process_of_another_launcher_takes_its_share(gpus, local_index, local_count, environ, flags, expected):
    gpus(4)
    job = Job("torchrun", 4, 3, "h:1", local_index, local_count)
    place = place_in(job, environ, **flags)
    assert (place.job, place.stderr_shown) == (job, True)
    assert shares([place]) == [expected]


@pytest.mark.parametrize("local_index, local_count", [(4, None), (0, 3), (2, 2)])
def test_a_process_for_which_there_is_no_share_says_so(gpus, local_index, local_count):
    gpus(4)
    with pytest.raises(JobError):
        place_in(Job("torchrun", 8, 5, "h:1", local_index, local_count), {})
