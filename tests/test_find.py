"""Flags and the variables of torchrun, srun, mpirun and TPU pods to a job."""

import pytest

from parallel.find import find_job
from parallel.job import Job, JobError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_NODEID": "2",
}
SLURM |= {"SLURM_STEP_NODELIST": "gpu[007-009,012]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
URI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}
BY_HAND = {"coordinator_address": "h", "coordinator_port": 9, "num_processes": 2, "process_id": 1}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ, flags, job",
    [
        ({}, {}, None),
        ({}, BY_HAND, Job("flags", 2, 1, "h:9")),
        (TORCHRUN, BY_HAND, Job("flags", 2, 1, "h:9")),
        ({}, {**BY_HAND, "coordinator_address": "h:7", "coordinator_port": None}, Job("flags", 2, 1, "h:7")),
        ({}, {**BY_HAND, "coordinator_address": "fe80::1"}, Job("flags", 2, 1, "[fe80::1]:9")),
        ({}, {**BY_HAND, "coordinator_address": "[fe80::1]:9"}, Job("flags", 2, 1, "[fe80::1]:9")),
        (TORCHRUN, {**BY_HAND, "num_processes": 1, "process_id": 0}, None),
        (TORCHRUN, {"coordinator_port": 9}, Job("torchrun", 8, 5, "node0:9", 1, 4)),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), {"coordinator_port": 9}, Job("torchrun", 8, 5, "node0:9", 1, None)),
        (
            without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            {"coordinator_port": 9},
            Job("torchrun", 8, 5, "node0:9", 0, 1),
        ),
        ({**SLURM, **TORCHRUN}, {"coordinator_port": 9}, Job("torchrun", 8, 5, "node0:9", 1, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {}, None),
        ({"MASTER_ADDR": "node0"}, {}, None),
        (SLURM, {"coordinator_port": 9}, Job("slurm", 5, 4, "gpu007:9", 0, 1)),
        ({**SLURM, "SLURM_NODEID": "1"}, {"coordinator_port": 9}, Job("slurm", 5, 4, "gpu007:9", 0, 2)),
        ({**SLURM, "SLURM_STEP_NODELIST": "a-1,b"}, {"coordinator_port": 9}, Job("slurm", 5, 4, "a-1:9", 0, 1)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, {}, None),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, {}, None),
        ({**MPI, **URI}, {"coordinator_port": 9}, Job("openmpi", 4, 3, "10.96.0.1:9", 1, 2)),
        (
            {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            {"coordinator_port": 9},
            Job("openmpi", 4, 3, "127.0.0.1:9", 1, 4),
        ),
        (MPI, {"coordinator_address": "h", "coordinator_port": 9}, Job("openmpi", 4, 3, "h:9", 1, 2)),
        ({**MPI, "MASTER_ADDR": "h"}, {"coordinator_port": 9}, Job("openmpi", 4, 3, "h:9", 1, 2)),
        (TPU, {}, Job("tpu", 2, 1, None)),
        ({**TPU, "JAX_PLATFORMS": "cpu"}, {}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, {}, None),
    ],
)
def test_the_job_follows_from_flags_or_the_launchers_variables(environ, flags, job):
    assert find_job(environ, **flags) == job


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM, {**MPI, **URI}])
def test_all_processes_derive_the_same_port_and_other_jobs_another(environ):
    rank, unique = {
        "RANK": ("RANK", "MASTER_PORT"),
        "SLURM_PROCID": ("SLURM_PROCID", "SLURM_JOB_ID"),
        "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri"),
    }[next(name for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") if name in environ)]
    jobs = [find_job({**environ, rank: str(i)}) for i in range(4)]
    assert len({job.coordinator for job in jobs}) == 1
    assert [job.process_id for job in jobs] == [0, 1, 2, 3]
    other = find_job({**environ, unique: environ[unique].replace("0", "1").replace("7", "8")})
    assert other.coordinator != jobs[0].coordinator
    port = int(jobs[0].coordinator.split(":")[1])
    assert 1024 < port < 32768 and str(port) != environ.get("MASTER_PORT")


@pytest.mark.parametrize(
    "environ, flags, words",
    [
        ({"RANK": "0"}, {}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, {}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "MASTER_ADDR and MASTER_PORT are not"),
        (without(TORCHRUN, "MASTER_PORT"), {}, "MASTER_ADDR and MASTER_PORT are not"),
        ({**TORCHRUN, "RANK": "8"}, {}, "RANK=8 with WORLD_SIZE=8: processes count from 0 to 7"),
        ({**TORCHRUN, "RANK": "x"}, {}, "RANK=x is not a number"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, {}, "WORLD_SIZE=0 is not a number from 1"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, {}, "LOCAL_RANK=-1 is not a number"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, {}, "LOCAL_RANK=4 with LOCAL_WORLD_SIZE=4: processes count from 0 to 3"),
        (without(SLURM, "SLURM_LOCALID"), {}, "SLURM_LOCALID is not set"),
        ({**SLURM, "SLURM_PROCID": "5"}, {}, "SLURM_PROCID=5"),
        ({**SLURM, "SLURM_STEP_NODELIST": "["}, {}, "names no host"),
        (MPI, {}, "type mpirun -x MASTER_ADDR=HOST"),
        ({**MPI, "MASTER_ADDR": "h"}, {}, "type --coordinator_port too"),
        (without(TPU, "TPU_WORKER_ID"), {}, "TPU_WORKER_ID is not set"),
        ({**TPU, "TPU_WORKER_ID": "2"}, {}, "TPU_WORKER_ID=2, but"),
        ({}, {**BY_HAND, "coordinator_port": None}, "type --coordinator_port too"),
        ({}, {**BY_HAND, "coordinator_address": "h:8"}, "contradicts --coordinator_port 9"),
        ({}, {"num_processes": 2}, "type --process_id and --coordinator_address too"),
    ],
)
def test_what_is_told_by_half_or_makes_no_sense_is_a_mistake(environ, flags, words):
    with pytest.raises(JobError, match=r"^[^\n]*$") as raised:
        find_job(environ, **flags)
    assert words in str(raised.value)


def test_a_port_that_is_none_is_a_mistake():
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "abc"}
    with pytest.raises(JobError, match="MASTER_PORT=abc is not a number"):
        find_job(torchrun)
    with pytest.raises(JobError, match="there is no port 99999"):
        find_job({}, coordinator_address="host:99999", num_processes=2, process_id=0)
