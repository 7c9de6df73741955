"""What the facts of a machine mean for training on it: each finding in a sentence, fine or worth a warning."""

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

Facts = Mapping[str, Any]
Finding = tuple[bool, str]

GIB = 2**30
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p")
# A container of Docker's gets 64 MiB, over which NCCL ends with a bus error.
LEAST_SHARED_MEMORY = GIB
LEAST_FREE_BYTES = 2 * GIB
NOTICED_BYTES = GIB


def advise(facts: Facts) -> list[dict[str, Any]]:
    """[{ok, text}]: ok=False where something should be seen to. facts: as cssm.hardware.gather returns them."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    return [{"ok": ok, "text": text} for ok, text in findings]


def _kinds(facts: Facts) -> Iterator[Finding]:
    kinds = list(dict.fromkeys(row["kind"] for row in facts["devices"]))
    if len(kinds) > 1:
        yield False, f"the devices differ ({', '.join(kinds)}): the slowest sets the pace, choose some by --gpus"
    elif facts["num_devices"] > 1:
        yield True, f"all {facts['num_devices']} devices are of one kind"


def _unused(facts: Facts) -> Iterator[Finding]:
    there, used = len(facts["gpus"] or ()), facts["num_devices"] if facts["platform"] == "gpu" else 0
    if used >= there:
        if there > 1:
            yield True, f"all {there} GPUs of this machine are used"
        return
    visible = facts["environment"].get("CUDA_VISIBLE_DEVICES")
    asked = f"CUDA_VISIBLE_DEVICES={visible} hides some" if visible is not None else "as --gpus or --num_devices asks"
    if not used:
        asked = "--platform cpu or JAX_PLATFORMS asks for another platform"
    yield False, f"{there} GPUs are in this machine, {used} of them used: {asked}"


def _others(facts: Facts) -> Iterator[Finding]:
    """Who is on the GPUs; what was seen before this program opened them. In a job the others may be its own."""
    if facts["platform"] != "gpu" or facts["gpus"] is None or facts["processes"] > 1:
        return
    taken = [row for row in facts["gpus"] if row["used_bytes"] > NOTICED_BYTES]
    for row in facts["gpu_processes"]:
        what = f"process {row['pid']} ({row['name']}, {row['used_bytes'] / GIB:.1f} GiB)"
        yield False, f"GPU {row['gpu']} is in use by {what}: less memory and a slower pace, --gpus names others"
    for row in taken if not facts["gpu_processes"] else ():
        what = f"has {row['used_bytes'] / GIB:.1f} GiB in use by a process that cannot be seen from here"
        yield False, f"GPU {row['index']} {what}: --gpus names others"
    if not (taken or facts["gpu_processes"]):
        yield True, "no other process is on the GPUs"


def _links(facts: Facts) -> Iterator[Finding]:
    links = facts["topology"] or {}
    # Which of the machine's GPUs are used is known where all are.
    all_used = facts["platform"] == "gpu" and len(links) > 1 and facts["num_devices"] >= len(links)
    slow = [f"{a} and {b} ({links[a][b]})" for a, b in combinations(links, 2) if not links[a][b].startswith("NV")]
    if all_used and slow:
        shown = ", ".join(slow[:3]) + (f" and {len(slow) - 3} more pairs" if len(slow) > 3 else "")
        yield False, f"no NVLink between {shown}: a larger --batch_size or --grad_accum makes up for a slow exchange"
    elif all_used:
        yield True, "every two GPUs are joined by NVLink"
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if facts["environment"].get(name, "0") not in ("", "0"):
            yield False, f"{name} is set, which makes the exchange slower: leave it out unless it is needed"


def _memory(facts: Facts) -> Iterator[Finding]:
    if facts["platform"] != "gpu":
        return
    environment = facts["environment"]
    if environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0"):
        yield False, "XLA_PYTHON_CLIENT_PREALLOCATE is off: memory is taken in pieces, which is slower and may not fit"
    elif environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default") == "platform":
        yield False, "XLA_PYTHON_CLIENT_ALLOCATOR=platform asks the driver for each array: very slow, leave it out"
    elif (limit := facts["devices"][0]["memory_bytes"]) and facts["gpus"]:
        total = facts["gpus"][0]["memory_bytes"]
        more = "; --mem_fraction 0.95 reserves more" if limit < 0.9 * total else ""
        yield True, f"{limit / GIB:.1f} of {total / GIB:.1f} GiB of each GPU are reserved{more}"


def _libraries(facts: Facts) -> Iterator[Finding]:
    path = facts["environment"].get("LD_LIBRARY_PATH", "")
    if facts["platform"] == "gpu" and any(name in path.lower() for name in ("cuda", "cudnn", "nccl")):
        yield False, "LD_LIBRARY_PATH names a CUDA that may take the place of the one installed with jax: unset it"


def _batch(facts: Facts) -> Iterator[Finding]:
    if (n := facts["num_devices"]) > 1:
        yield True, f"--batch_size counts for each device: a step takes {n} times as many images as on one"


def _cores(facts: Facts) -> Iterator[Finding]:
    cores, here = facts["host"]["cpu_cores"], facts["local_devices"]
    if facts["platform"] == "cpu":
        if here > 1:
            yield False, f"{here} simulated devices share {cores} CPU cores: good for tests, no gain in speed"
    elif cores < 2 * here:
        yield False, f"{cores} CPU cores prepare data for {here} devices: fewer than 2 for each may keep them waiting"
    else:
        yield True, f"{cores} CPU cores prepare data for {here} devices"


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    size = facts["host"]["shm_bytes"]
    if facts["platform"] == "gpu" and facts["num_devices"] > 1 and size is not None and size < LEAST_SHARED_MEMORY:
        yield False, f"/dev/shm has {size / 2**20:.0f} MiB, NCCL needs more: start the container with --shm-size=1g"


def _open_files(facts: Facts) -> Iterator[Finding]:
    limit, least = facts["host"]["open_files"], 4096 if facts["num_devices"] > 8 else 1024
    if limit is not None and limit < least:
        yield False, f"a process may open {limit} files, {least} are safer: type ulimit -n {least} first"


def _folders(facts: Facts) -> Iterator[Finding]:
    for name, what in (("checkpoint_dir", "checkpoints"), ("cache_dir", "generated data and compiled programs")):
        folder = facts["host"][name]
        where = f"--{name} {folder['path']}"
        if folder["filesystem"] in NETWORK:
            yield False, f"{where} ({what}) is on {folder['filesystem']}, a network: a local disk is faster and safer"
        if folder["free_bytes"] < LEAST_FREE_BYTES:
            yield False, f"{where} ({what}) has {folder['free_bytes'] / GIB:.1f} GiB free: make room or choose another"


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _kinds,
    _unused,
    _others,
    _links,
    _memory,
    _libraries,
    _batch,
    _cores,
    _shared_memory,
    _open_files,
    _folders,
)
