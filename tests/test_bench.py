"""The verb bench: which rows there are, what ends it early, what it says and leaves.

`rows` stands in for the processes that measure; the slow test at the end has the real ones.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cssm import bench as module
from cssm import cli
from cssm.bench import plan
from cssm.config import UserError, parse_args, resolve
from cssm.data import outline
from parallel.devices import DeviceError

ROOT = Path(__file__).resolve().parents[1]
FACTS = {"platform": "cpu", "num_devices": 8, "devices": [{"kind": "cpu"}] * 8, "versions": {"python": "3"}}
FACTS |= {"host": {"cpu_cores": 2, "memory_bytes": 5}}


def planned(visible=8, **settings):
    config = resolve(settings, {})
    points = plan(config, visible, outline(config))
    return [(p.num_devices, p.batch_size, p.global_batch_size) for p in points]


def test_weak_scaling_keeps_the_batch_of_a_device():
    assert planned(devices="1,2,4") == [(1, 32, None), (2, 32, None), (4, 32, None)]
    assert planned(devices="2", batch_sizes="8,16") == [(2, 8, None), (2, 16, None)]
    assert planned(devices="1,2", batch_sizes="16,8") == [(1, 16, None), (2, 16, None), (1, 8, None), (2, 8, None)]
    assert planned(visible=3) == [(3, 32, None)], "all that are there, unless told otherwise"


def test_strong_scaling_keeps_the_batch_of_all():
    """That of the first number of devices, or the total as given."""
    assert planned(devices="1,2,4", scaling="strong", batch_size=16) == [(n, None, 16) for n in (1, 2, 4)]
    assert planned(devices="2,8", scaling="strong", batch_sizes="4,8", grad_accum=2) == [
        (2, None, 16),
        (8, None, 16),
        (2, None, 32),
        (8, None, 32),
    ]
    assert planned(devices="1,4", scaling="strong", global_batch_size=64) == [(1, None, 64), (4, None, 64)]


@pytest.mark.parametrize(
    "settings,error,words",
    [
        ({"devices": "1,9"}, UserError, "--devices 1,9: 9 are not there, type at most 8"),
        ({"global_batch_size": 64}, UserError, "type --batch_size, or --scaling strong"),
        ({"devices": "1,3", "scaling": "strong", "batch_size": 16}, DeviceError, "does not divide by 3 devices"),
        ({"batch_sizes": "32,2048"}, UserError, "the training set has 1258 examples and one step takes 16384"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(settings, error, words):
    with pytest.raises(error, match=words):
        planned(**settings)


def test_the_devices_of_a_row_are_the_first_of_those_chosen():
    config = resolve({"gpus": "5,3,2", "devices": "1,2", "profile": "t"}, {})
    points = plan(config, 3, outline(config))
    assert [p.gpus for p in points] == ["5", "5,3"]
    assert [Path(p.profile).name for p in points] == ["1_devices_batch_32", "2_devices_batch_32"]


@pytest.fixture
def rows(monkeypatch):
    """Set `full` to the batch_size from which on memory runs out; `asked` tells which rows were measured."""
    told = SimpleNamespace(full=1000, asked=[], peer_full=False, peer_killed=False)

    def apart(fn, config, *args):
        if fn is module.survey:
            return FACTS
        told.asked.append((config.num_devices, config.batch_size))
        if config.batch_size >= told.full:
            return {"out_of_memory": f"out of memory with {config.batch_size} images per device"}
        return measured(config.num_devices, config.batch_size, 100.0 * config.num_devices)

    def theirs(task):
        told.task = task
        if told.peer_killed:
            raise UserError("killed", 4)
        if told.peer_full:
            return {"out_of_memory": "PyTorch is out of memory"}
        return measured(task.devices, task.batch_size, 80.0 * task.devices)

    monkeypatch.setattr(module, "apart", apart)
    monkeypatch.setattr(module.peer, "measure", theirs)
    monkeypatch.setattr(module.peer, "check_installed", lambda needed: None)
    return told


def measured(devices, batch_size, rate):
    row = {"devices": devices, "batch_size": batch_size, "grad_accum": 1, "effective_batch": devices * batch_size}
    row |= {"step_ms": 1.0, "step_ms_quartiles": [1.0, 2.0], "images_per_s": rate, "data_wait_ms": 0.0, "mfu": None}
    return row | {"peak_bytes_per_device": None}


def table_rows(text):
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_a_table_and_two_files(tmp_path, rows, capsys):
    assert cli.main(["bench", "--devices", "1,2", "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "bench of simple hgru_bi on digits; loading JAX ..." in said.splitlines()[0]
    assert "cssm on 2 devices, batch_size 32: 200 images/s, 1.00 ms a step" in said
    assert len(table_rows(said)) == 3 and " 100.0% " in said
    saved = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert saved["command"] == f"main.py bench --devices 1,2 --output {tmp_path / 'out'}"
    assert table_rows((tmp_path / "out" / "bench.md").read_text()) == table_rows(said)


def test_headless_is_an_event_a_row(tmp_path, rows, capfd):
    argv = ["bench", "--headless", "--devices=1,2", "--batch_sizes=8,16", f"--checkpoint_dir={tmp_path}"]
    assert cli.main(argv) == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(e["event"], e["devices"], e["batch_size"]) for e in events] == [
        ("bench", n, size) for size in (8, 16) for n in (1, 2)
    ]
    assert events[1]["efficiency"] == 1.0
    (folder,) = tmp_path.iterdir()
    assert "_bench_simple_hgru_bi" in folder.name


def test_a_sweep_ends_where_memory_does_and_keeps_its_rows(tmp_path, rows, capsys):
    rows.full = 32
    argv = ["bench", "--batch_sizes", "8,16,32,64", "--devices", "1,2", "--output", str(tmp_path / "out")]
    assert cli.main(argv) == 0
    assert rows.asked == [(1, 8), (2, 8), (1, 16), (2, 16), (1, 32)]
    note = "note: with --devices 1: out of memory with 32 images per device; rows after that were not measured"
    said = capsys.readouterr().out
    assert note in said and note in (tmp_path / "out" / "bench.md").read_text() and len(table_rows(said)) == 5


def test_without_a_row_it_ends_as_a_run_that_is_out_of_memory(tmp_path, rows, capsys):
    rows.full = 1
    assert cli.main(["bench", "--output", str(tmp_path / "out")]) == 3
    assert "out of memory with 32 images per device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path, rows, capsys):
    (tmp_path / "out").mkdir()
    assert cli.main(["bench", "--output", str(tmp_path / "out")]) == 0
    assert cli.main(["bench", "--output", str(tmp_path / "out")]) == 2
    assert "out exists already and is not overwritten" in capsys.readouterr().err


PEER = ["--arch", "baseline", "--stem_mode", "patch", "--patch_size", "4", "--peer", "torch"]


def test_a_peer_is_timed_beside_each_row(tmp_path, rows, capsys):
    argv = ["bench", *PEER, "--devices", "1,2", "--gpus", "4,2", "--output", str(tmp_path / "out")]
    assert cli.main(argv) == 0
    lines = table_rows(capsys.readouterr().out)
    assert [line.split("|")[1].strip() for line in lines] == ["program", "cssm", "torch", "cssm", "torch"]
    assert lines[1].rstrip("| ").endswith("1.25")
    task = rows.task
    assert (task.devices, task.batch_size, task.image_shape, task.num_classes) == (2, 32, (16, 16, 1), 10)
    assert task.indices == (), "on a CPU there are none"
    point = resolve({"gpus": "4,2"}, {})
    assert module._task(point, {"devices": 2, "batch_size": 1}, "gpu", outline(point)).indices == (4, 2)


def test_a_peer_out_of_memory_leaves_our_row(tmp_path, rows, capsys):
    rows.peer_full = True
    assert cli.main(["bench", *PEER, "--output", str(tmp_path / "out")]) == 0
    assert "note: PyTorch is out of memory" in capsys.readouterr().out


def test_a_peer_that_is_killed_leaves_our_row(tmp_path, rows, capsys):
    rows.peer_killed = True
    argv = ["bench", *PEER, "--devices", "1,2", "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match="killed"):
        module.bench(parse_args(argv).config)
    assert "cssm on 1 device, batch_size 32: 100 images/s" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "out" / "bench.json").read_text())["rows"]
    assert row["program"] == "cssm" and row.get("ratio_to_peer") is None


@pytest.mark.parametrize(
    "argv,words",
    [
        (["bench", "--epochs", "3"], "--epochs does not apply to the verb bench: it is for train"),
        (["bench", "--num_devices", "2"], "--num_devices does not apply to the verb bench"),
        (["bench", "--resume", "auto"], "--resume does not apply to the verb bench"),
        (["train", "--batch_sizes", "8,16"], "--batch_sizes does not apply to the verb train: it is for bench"),
        (["--steps", "5"], "--steps does not apply to the verb train: it is for bench"),
        (["devices", "--peer", "torch"], "--peer does not apply to the verb devices"),
        (["bench", "--peer", "torch"], "--peer torch does not apply with --arch simple: it needs --arch baseline"),
    ],
)
def test_flags_belong_to_verbs(argv, words):
    with pytest.raises(UserError) as refused:
        parse_args(argv)
    assert words in str(refused.value)


def test_it_takes_the_configuration_of_a_run(tmp_path):
    """What that says of a whole run, and not of a step, is left out; what is typed wins."""
    path = tmp_path / "config.yaml"
    path.write_text("epochs: 3\nlog_every: 7\nembed_dim: 8\nbatch_size: 64\n")
    parsed = parse_args(["bench", "--config", str(path), "--batch_sizes", "4,8"])
    assert (parsed.config.embed_dim, parsed.config.batch_size) == (8, None)
    assert parse_args(["bench", "--config", str(path)]).config.batch_size == 64


def test_one_of_a_job_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert cli.main(["bench"]) == 2
    assert "bench uses all devices from one process" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_program_measures_real_steps(tmp_path):
    argv = ["bench", "--headless", "--devices=1,2", "--cssm=gated", "--embed_dim=4", "--image_size=8", "--steps=3"]
    argv += ["--seq_len=2", "--kernel_size=3", "--batch_size=8", f"--output={tmp_path / 'out'}", "--no_compile_cache"]
    argv += [f"--profile={tmp_path / 'trace'}"]
    result = subprocess.run(
        [sys.executable, "-W", "error", "main.py", *argv], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    one, two = map(json.loads, result.stdout.splitlines())
    assert (one["devices"], one["effective_batch"], two["effective_batch"]) == (1, 8, 16)
    assert min(one["images_per_s"], two["images_per_s"], one["step_ms"], one["flops_per_image"]) > 0
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["platform"] == "cpu"
    assert len(list((tmp_path / "trace").glob("*/plugins/profile/*/*.trace.json.gz"))) == 2
