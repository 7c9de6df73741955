"""The recipes in configs/ load, say how to run them, set only what applies, and take two steps.

What is in configs/launch/ ends in the command that it should, with the scheduler or the cloud played by stubs.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from cssm import train
from cssm.config import Config, applicable, parse_args, read_yaml
from cssm.recipes import scaled_lr
from parallel.find import find_job
from parallel.job import Job

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(ROOT.glob("configs/*.yaml"))
LAUNCH = sorted(ROOT.glob("configs/launch/*"))
SCRIPTS = [path for path in LAUNCH if path.suffix != ".yaml"]
# What the guides call the recipes of 2, 4 and 8 GPUs: images per GPU, learning rate, epochs of warm-up.
OF_GPUS = {2: (32, 2e-3, 2), 4: (32, 4e-3, 3), 8: (16, 8e-3, 5)}
# Flags with which two steps of a recipe take seconds: on as many devices as it is meant for, the rest smaller.
SHORT = {
    "large": "--num_devices 4 --sync_backend auto --dtype bf16 --prefetch 4 --embed_dim 16 --depth 2 --batch_size 2",
    "production": "--num_devices 4 --dtype bf16 --embed_dim 16 --depth 2 --global_batch_size 8",
    **{f"pathfinder14_{cell}": "--num_devices 1 --embed_dim 8 --batch_size 2" for cell in ("gdn", "hgru_bi", "gated")},
    "augmented_digits": "--num_devices 1 --embed_dim 8 --depth 1",
    **{f"gpus{n}": f"--num_devices {n}" for n in OF_GPUS},
}


def header(path):
    return [line for line in path.read_text().splitlines() if line.startswith("#")]


def test_there_are_recipes_and_ways_to_launch_and_nothing_else():
    assert {*RECIPES, ROOT / "configs" / "launch", ROOT / "configs" / "sweep"} == set(ROOT.glob("configs/*"))
    names = "compare_cells.sh jobset.yaml run_all.sh scaling.sh sky.yaml slurm.sbatch torchrun.sh tpu_vm.sh"
    assert [path.name for path in LAUNCH] == names.split()
    assert {"nano", "large", "gpus2", "gpus4", "gpus8", *SHORT} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_sets_only_what_applies(path):
    parsed = parse_args(["--config", str(path)])
    assert parsed.typed == read_yaml(path)
    assert parsed.typed.items() <= applicable(parsed.config).items()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_header_is_the_command_the_hardware_and_what_was_reached(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    first, *rest = header(path)
    command = f"# python main.py --config configs/{path.name}"
    assert first.startswith(command)
    parse_args(shlex.split(first)[3:])
    assert "Hardware: " in " ".join(rest)
    # What was reached, or the word that it was not tried.
    assert re.search(r"accuracy \d|Not run to its end", " ".join(rest))


@pytest.mark.parametrize("gpus", OF_GPUS)
def test_the_recipes_of_several_gpus_keep_their_batch_rate_and_warm_up(gpus):
    images, lr, warmup = OF_GPUS[gpus]
    config = parse_args(["--config", str(ROOT / f"configs/gpus{gpus}.yaml")]).config
    effective = images * gpus
    assert config.global_batch_size == effective
    assert scaled_lr(config, effective)[0] == pytest.approx(lr)
    assert config.warmup_epochs == warmup
    assert (config.weight_decay, config.epochs) == (1e-4, 20)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_takes_two_steps(path, tmp_path):
    short = ["--max_steps", "2", "--max_train_examples", "128", "--max_eval_examples", "16"]
    short += SHORT.get(path.stem, "--num_devices 1").split()
    parsed = parse_args(["--config", str(path), "--checkpoint_dir", str(tmp_path), "--quiet", *short])
    assert train(parsed.config, parsed.typed)["step"] == 2


# What is in configs/launch/


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.name)
def test_a_way_to_launch_says_how_and_whether_it_was_run(path):
    said = " ".join(header(path))
    assert path.name in said
    assert re.search(r"Not run|Rehearsed on|Run on", said)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(path):
    assert "\nset -euo pipefail\n" in path.read_text()
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        result = subprocess.run(["shellcheck", path], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@pytest.fixture
def stub(tmp_path):
    """Puts a shell script under a name on the PATH of what `launch` starts."""

    def make(name: str, script: str, folder: Path = tmp_path / "bin") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)

    return make


@pytest.fixture
def launch(tmp_path, stub):
    """Runs a command in an environment of its own, with a `python` that only tells how it was called.

    Returns the exit code, the configuration that main.py would have, and the variables that it would see.
    """
    seen = tmp_path / "seen"
    stub("python", f'printf "%s\\0" "$@" >"{seen}"\nenv -0 >"{seen}.env"\nexit "${{CODE:-0}}"')

    def run(command: list[str], cwd: Path = ROOT, **variables: str) -> tuple[int, Config, dict[str, str]]:
        environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), **variables}
        code = subprocess.run(command, cwd=cwd, env=environment).returncode
        door, *argv = seen.read_text().split("\0")[:-1]
        assert door == "main.py"
        pairs = [pair.split("=", 1) for pair in Path(f"{seen}.env").read_text().split("\0")[:-1]]
        return code, parse_args(argv).config, dict(pairs)

    return run


def job_of(config: Config, variables: dict[str, str]) -> Job:
    """The job that main.py would join."""
    names = ("coordinator_address", "coordinator_port", "num_processes", "process_id")
    return find_job(variables, **{name: getattr(config, name) for name in names})


def test_torchrun_starts_a_process_for_each_gpu(launch, stub, monkeypatch):
    monkeypatch.chdir(ROOT)
    stub("torchrun", 'while [[ $1 == --* ]]; do [[ $1 == *=?* ]] || exit 9; shift; done\nexec python "$@"')
    command = ["bash", "configs/launch/torchrun.sh", "--config", "configs/gpus2.yaml"]
    code, config, _ = launch(command)
    assert (code, config.global_batch_size) == (0, 64)


@pytest.mark.parametrize("ends, requeued", [("0", False), ("143", True), ("3", False)])
def test_slurm_goes_on_after_its_time_was_over(launch, stub, tmp_path, ends, requeued):
    stub("srun", 'while [[ $1 == --* ]]; do shift; done\nexec "$@"')
    stub("scontrol", f'[ "$*" = "requeue 77" ] && touch "{tmp_path}/requeued"')
    command = ["bash", "configs/launch/slurm.sbatch", "--bf16"]
    code, config, _ = launch(command, SLURM_JOB_ID="77", CODE=ends)
    assert (code, (tmp_path / "requeued").exists()) == (int(ends), requeued)
    assert (config.resume, config.checkpoint_dir) == ("auto", "runs/slurm-77")


@pytest.mark.parametrize("endpoints", ["10.0.0.1,10.0.0.2", "a:b:10.0.0.1,a:b:10.0.0.2"])
def test_the_hosts_of_a_tpu_find_each_other(launch, stub, tmp_path, endpoints):
    stub("gcloud", '[ "${*: -1}" != "${*: -1#--command=}" ] || exit 9\nlast=${*: -1}\nbash -c "${last#--command=}"')
    answers = f"case $4 in */worker-network-endpoints) echo {endpoints};; */agent-worker-number) echo 1;; esac"
    stub("curl", answers)
    stub("python", f'exec "{tmp_path}/bin/python" "$@"', tmp_path / "cssm/.venv/bin")
    command = ["bash", "configs/launch/tpu_vm.sh", "--arch", "vit", "--run_name", "a b"]
    code, config, seen = launch(command, TPU="t", ZONE="z")
    assert code == 0
    assert job_of(config, seen) == Job("flags", 2, 1, "10.0.0.1:8476")
    assert (config.arch, config.run_name) == ("vit", "a b")


def test_the_pods_of_a_jobset_find_each_other(launch, monkeypatch):
    monkeypatch.chdir(ROOT)
    jobset = YAML(typ="safe").load(ROOT / "configs/launch/jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (part,) = jobset["spec"]["replicatedJobs"]
    job = part["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (job["completionMode"], job["backoffLimit"], pod["restartPolicy"]) == ("Indexed", 0, "Never")
    assert str(job["parallelism"]) == str(job["completions"]) == variables["WORLD_SIZE"] == "2"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    # The name of the first pod: <set>-<part>-<job>-<index>.<set>
    name = jobset["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-{part['name']}-0-0.{name}"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}

    code, config, seen = launch(container["command"], JOB_COMPLETION_INDEX="1", **variables)
    assert (code, config.resume) == (0, "auto")
    job = job_of(config, seen)
    assert (job.kind, job.num_processes, job.process_id, job.local_count) == ("torchrun", 2, 1, 1)
    assert job.coordinator.startswith("cssm-train-0-0.cssm:")
    assert str(Path(config.checkpoint_dir).parent) in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_nodes_of_a_skypilot_task_find_each_other(launch, stub, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    task = YAML(typ="safe").load(ROOT / "configs/launch/sky.yaml")
    assert set(task) == {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run"}
    assert task["num_nodes"] == 2 and re.fullmatch(r"\w+:\d+", task["resources"]["accelerators"])
    stub("python", f'exec "{tmp_path}/bin/python" "$@"', tmp_path / ".venv/bin")
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    code, config, seen = launch(["bash", "-ec", task["run"]], tmp_path, **nodes, **task["envs"])
    assert code == 0
    assert job_of(config, seen) == Job("flags", 2, 1, "10.0.0.1:8476")
    assert (config.preset, config.dtype) == ("base", "bf16")


@pytest.mark.slow
def test_everything_runs_on_whatever_is_there(tmp_path):
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        "TRAIN": "--max_steps 4 --max_train_examples 256 --max_eval_examples 32",
        "BENCH": "--max_steps 20",
    }
    command = ["bash", "configs/launch/run_all.sh", str(tmp_path / "output")]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "output" / "results.json").read_text())
    assert results["train"]["step"] == 4
    assert results["evaluate"]["count"] == 32
    table = results["throughput"]
    assert [(row["devices"], row["batch_size"], row["effective_batch"]) for row in table] == [
        (1, 32, 32),
        (2, 32, 64),
        (4, 32, 128),
    ]
    for row in table:
        assert row["efficiency"] == pytest.approx(row["images_per_s"] / table[0]["images_per_s"] / row["devices"])
    assert "speed-up" in result.stdout


SCALING = {
    "PYTHON": sys.executable,
    "DATA": "--dataset digits --max_train_examples 64",
    "VIT": "--arch baseline --stem_mode patch --patch_size 4 --embed_dim 4 --depth 1 --num_heads 2 --batch_size 4",
    "HGRU": "--cssm hgru_bi --embed_dim 4 --seq_len 2 --batch_size 4",
    "STEPS": "2",
    "PREDICTED": "10",
    "MEAN_MIB": "1",
}


@pytest.mark.slow
def test_scaling_over_whatever_is_there_is_measured_once(tmp_path):
    output = tmp_path / "scaling"
    two = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, **SCALING, "XLA_FLAGS": two}
    command = ["bash", "configs/launch/scaling.sh", str(output)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    assert (output / "parity.txt").read_text().count("PASS") == 2
    means = re.findall(r"pmean_complex_safe of (\w+) [\d.]+ ms, [\d.]+ times", (output / "means.txt").read_text())
    assert means == ["float32", "complex64"]
    assert {len((output / f"predicted_{n}.jsonl").read_text().splitlines()) for n in (1, 2)} == {10}
    text = (output / "scaling.md").read_text()
    names = "vit_weak hgru_bi_weak shard_none shard_optimizer shard_params vit_strong hgru_bi_strong"
    assert re.findall(r"\*\*(.*)\*\*", text) == names.split()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if re.match(r"\| +\d", line)]
    weak, strong, split = [["1", "4", "4"], ["2", "4", "8"]], [["1", "4", "4"], ["2", "2", "4"]], ["2", "4", "8"]
    assert rows == weak * 2 + [split] * 3 + strong * 2
    again = {**environment, "PARTS": "strong weak"}
    result = subprocess.run(command, cwd=ROOT, env=again, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "compiling" not in result.stdout
    assert (output / "scaling.md").read_text() == text
    result = subprocess.run(command, cwd=ROOT, env={**again, "STEPS": "3"}, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stderr.endswith(
        "vit_strong was made with other flags, type another FOLDER\n"
    )


def test_a_part_of_scaling_that_is_not_there_is_refused(tmp_path):
    environment = {**os.environ, **SCALING, "PARTS": "weird"}
    command = ["bash", "configs/launch/scaling.sh", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stderr.startswith("error: no part weird in PARTS, type some of:")


@pytest.mark.slow
def test_cells_are_trained_once_each_and_compared(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "CELLS": "standard no_gate"}
    tiny = ["--dataset", "digits", "--max_steps", "25", "--embed_dim", "4", "--seq_len", "2"]
    command = ["bash", "configs/launch/compare_cells.sh", str(tmp_path), *tiny]
    outputs = []
    for _ in range(2):
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, result.stderr
        outputs.append(result.stdout)
    rows = [[cell.strip() for cell in line.split("|")] for line in outputs[0].splitlines() if line.startswith("| ")]
    assert [(row[1], row[4]) for row in rows[1:]] == [("standard", "25"), ("no_gate", "25")]
    assert all(cell != "-" for row in rows for cell in row), "the program's events tell all that the table holds"
    assert outputs[0].count("main.py --checkpoint_dir") == 2 and outputs[0].endswith(outputs[1])
    result = subprocess.run([*command, "--lr", "1"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "begun with the flags '--dataset digits" in result.stderr


@pytest.mark.parametrize("code, ends", [("0", 0), ("143", 0), ("5", 0), ("3", 3), ("130", 130)])
def test_a_cell_that_fails_by_itself_does_not_keep_the_others(stub, tmp_path, code, ends):
    """0: as the comparison ends; nor does one that ran out of its time. Every other failure ends the script."""
    stub("python", f'echo "$2 $*" >>"{tmp_path}/calls"\n[ "$2" = compare ] || exit {code}')
    (tmp_path / "output" / "gated").mkdir(parents=True)
    (tmp_path / "output" / "gated" / "metrics.jsonl").write_text('{"event": "summary"}\n')
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": "python"}
    command = ["bash", ROOT / "configs/launch/compare_cells.sh", str(tmp_path / "output"), "--lr", "1"]
    result = subprocess.run(command, env={**environment, "CELLS": "gated gdn hgru", "LIMIT": "60"}, capture_output=True)
    assert result.returncode == ends
    calls = (tmp_path / "calls").read_text().splitlines()
    flags = "--dataset pathfinder --max_steps 500 --lr 1 --headless"
    trained = [re.fullmatch(rf".* --run_name (\w+) --resume auto --cssm \1 {flags}", call) for call in calls]
    done = ["gdn", "hgru", None] if ends == 0 else ["gdn"]
    assert [match and match[1] for match in trained] == done
    assert ends or calls[-1].startswith("compare main.py compare ")


def test_the_script_of_cells_asks_for_a_folder():
    script = ROOT / "configs/launch/compare_cells.sh"
    assert subprocess.run(["bash", script, "--lr", "1"], capture_output=True).returncode == 2


def test_what_fails_ends_the_script_with_its_code(launch, stub, tmp_path):
    stub("python", "exit 3")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": "python"}
    command = ["bash", "configs/launch/run_all.sh", str(tmp_path / "output")]
    assert subprocess.run(command, cwd=ROOT, env=environment, capture_output=True).returncode == 3
