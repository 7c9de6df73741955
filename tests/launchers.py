"""Programs that start others, played: `python launchers.py NAME ...` does on this machine what NAME does on many.

Each starts two processes, with the variables that the real one sets, waits for both, and ends with the first code that
is not 0. What cannot be typed behind their own command (kubectl, sky) is taken from the variable SMALL.
"""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ruamel.yaml import YAML

HERE = "127.0.0.1"
RANKS = (0, 1)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HERE, 0))
        return probe.getsockname()[1]


def start(commands: Sequence[Sequence[str]], variables: Sequence[dict[str, str]]) -> int:
    """All at once; the first code that is not 0."""
    together = zip(commands, variables, strict=True)
    processes = [subprocess.Popen(command, env={**os.environ, **more}) for command, more in together]
    return next(filter(None, [process.wait() for process in processes]), 0)


def behind_options(words: list[str]) -> list[str]:
    """Without the launcher's own --option=value."""
    return words[next(i for i, word in enumerate(words) if not word.startswith("--")) :]


def torchrun(words: list[str]) -> int:
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": HERE, "MASTER_PORT": str(free_port())}
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in RANKS]
    return start([["python", *behind_options(words)]] * 2, ranks)


def srun(words: list[str]) -> int:
    """A task on each of two nodes."""
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    job |= {"SLURM_STEP_NODELIST": f"{socket.gethostname()},other", "SLURM_JOB_ID": str(os.getpid())}
    tasks = [{**job, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} for rank in RANKS]
    return start([behind_options(words)] * 2, tasks)


def sbatch(words: list[str]) -> int:
    return start([["bash", *words]], [{"SLURM_JOB_ID": str(os.getpid())}])


def mpirun(words: list[str]) -> int:
    given = {}
    while words[0] in ("-n", "-x"):
        if words[0] == "-x":
            name, value = words[1].split("=")
            given[name] = value
        words = words[2:]
    job = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": str(os.getpid()), **given}
    ranks = [{**job, "OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_RANK": str(r)} for r in RANKS]
    return start([words] * 2, ranks)


def gcloud(words: list[str]) -> int:
    """What --command says on each host of a TPU VM, whose checkout is the folder here."""
    command = words[-1].removeprefix("--command=")
    hosts = [{"CHECKOUT": str(Path.cwd()), "WORKER": str(rank)} for rank in RANKS]
    return start([["bash", "-c", command]] * 2, hosts)


def curl(words: list[str]) -> int:
    """The metadata of such a host."""
    host = socket.gethostname()
    answers = {"worker-network-endpoints": f"{host},{host}", "agent-worker-number": os.environ.get("WORKER", "")}
    print(answers[words[-1].rpartition("/")[2]])
    return 0


def kubectl(words: list[str]) -> int:
    """The pods of a JobSet; what they mount is a folder here, and the name of the first of them this machine's."""
    assert words[:2] == ["create", "-f"]
    (part,) = YAML(typ="safe").load(Path(words[2]))["spec"]["replicatedJobs"]
    (container,) = part["template"]["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    variables |= {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free_port())}
    *shell, script = container["command"]
    command = [*shell, f"{script.rstrip().replace(' /runs', f' {Path.cwd()}/runs')} {os.environ['SMALL']}"]
    return start([command] * 2, [{**variables, "JOB_COMPLETION_INDEX": str(rank)} for rank in RANKS])


def sky(words: list[str]) -> int:
    """The nodes of a SkyPilot task; its setup, which installs, is left out."""
    assert words[0] == "launch"
    task = YAML(typ="safe").load(Path(words[1]))
    nodes = {"SKYPILOT_NODE_IPS": "\n".join([socket.gethostname()] * 2), "SKYPILOT_NUM_NODES": str(task["num_nodes"])}
    flags = f"{task['envs']['FLAGS']} {os.environ['SMALL']} --coordinator_port {free_port()}"
    ranks = [{**nodes, "FLAGS": flags, "SKYPILOT_NODE_RANK": str(rank)} for rank in RANKS]
    return start([["bash", "-ec", task["run"]]] * 2, ranks)


PLAYED = {play.__name__: play for play in (torchrun, srun, sbatch, mpirun, gcloud, curl, kubectl, sky)}


def install(folder: Path) -> None:
    """All of them as programs in a folder for the PATH."""
    folder.mkdir()
    for name in PLAYED:
        words = [sys.executable, str(Path(__file__).resolve()), name]
        (folder / name).write_text(f'#!/bin/bash\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)


if __name__ == "__main__":
    sys.exit(PLAYED[sys.argv[1]](sys.argv[2:]))
