"""Settings of devices and processes."""

import dataclasses
from functools import partial

from cssm.knobs import INFERRING, WITH_DEVICES, knob

_parallel = partial(knob, group="parallel", resume="fresh", verbs=WITH_DEVICES)
# A benchmark has one process, and numbers of devices of its own (--devices).
_RUN = ("train", "devices")
_DEVICES = (*WITH_DEVICES, *INFERRING)
# Where this process stands in a job: never part of what describes a run.
_process = partial(_parallel, saved=False, verbs=_RUN)


@dataclasses.dataclass(frozen=True)
class ParallelSettings:
    """Which devices, in how many processes, and what they share."""

    # fmt: off
    gpus: str | None = _parallel(None, "indices of the devices to use, for example 0,1", aliases=("gpu_ids",),
        unset="all", verbs=_DEVICES)
    num_devices: int | None = _parallel(None, "use the first so many devices", bounds="[1,)", unset="all",
        verbs=(*_RUN, *INFERRING))
    platform: str = _parallel("auto", "kind of device", choices=("auto", "cpu", "gpu", "tpu"),
        aliases=("target_device",), verbs=_DEVICES)
    multi_gpu: str = _parallel("auto", "auto and dp use all devices in one process, ddp has a process for each, "
        "off uses the first", choices=("auto", "dp", "ddp", "off"), verbs=(*_RUN, *INFERRING))
    sync_backend: str = _parallel("auto", "how gradients are averaged: auto and nccl by the devices, cpu on the "
        "host, where collectives do not work", choices=("auto", "nccl", "cpu"))
    shard: str = _parallel("none", "what is split over the devices instead of copied: the state of the optimizer, "
        "or parameters too", choices=("none", "optimizer", "params"))
    sync_bn: bool = _parallel(False, "normalise with the statistics of all devices", resume="kept",
        applies={"norm_type": ("batch",)})
    nproc_per_node: str | None = _parallel(None, "start so many processes here, or auto: one per device",
        unset="one process", verbs=_RUN)
    coordinator_address: str | None = _process(None, "host of process 0, in a job of several processes",
        aliases=("master_addr",), unset="by torchrun, SLURM, Open MPI or TPU variables")
    coordinator_port: int | None = _process(None, "port at which process 0 listens", bounds="[1,65535]",
        aliases=("master_port",), unset="likewise, or a free one")
    num_processes: int | None = _process(None, "processes in the job", bounds="[1,)", unset="likewise, or 1")
    process_id: int | None = _process(None, "which of them this is, from 0", bounds="[0,)", unset="likewise")
    heartbeat_timeout: int = _parallel(60, "seconds after which a process that does not answer ends the job",
        bounds="[1,)", verbs=_RUN)
    self_test_timeout: float = _parallel(120.0, "seconds that the test of the collectives at the start may take, "
        "0 for no test", bounds="[0,)", verbs=_RUN)
    parity: bool = _parallel(False, "train 3 steps on one device and on all, and compare", verbs=("devices",))
    # fmt: on
