"""The program from outside: help without jax, a sentence and a code for each ending, only JSON on stdout."""

import errno
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import cssm
from cssm import cli
from cssm.config import Config, UserError, parse_args

ROOT = Path(__file__).resolve().parents[1]


def run(*argv: str, code: str | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """main.py, or `code` with the same arguments, in a fresh interpreter."""
    program = ["-c", code] if code else ["main.py"]
    return subprocess.run(
        [sys.executable, "-W", "error", *program, *argv],
        cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


# Takes the place of training: says on every channel what it was given, and leaves how it is told to.
FAKE_TRAINING = """
import os, subprocess, sys, types
def train(config, typed=None, json_stream=None):
    print("python prints")
    os.write(1, b"a library prints\\n")
    subprocess.run(["echo", "a child prints"])
    if json_stream:
        json_stream.write('{"event": "config", "lr": %r}\\n' % typed["lr"])
    ENDING
sys.modules["cssm.training"] = types.SimpleNamespace(train=train)
sys.modules["cssm.hardware"] = types.SimpleNamespace(show_devices=train)
from cssm import cli
cli.reserve = lambda config: os.environ.update(RESERVED=os.environ["XLA_FLAGS"])
sys.exit(cli.main())
"""


def test_help_and_mistakes_import_no_jax_and_no_yaml():
    code = "import sys; sys.argv[0] = 'x'; from cssm.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "heavy = {'jax', 'numpy', 'flax', 'ruamel', 'rich', 'argparse'}\n"
    code += "print(heavy & {name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    for argv in (["--help"], ["--version"], ["--embed_dimm", "1"]):
        assert run(*argv, code=code).stderr.splitlines()[-1] == "set()"


def test_help_and_version_answer_on_stdout():
    for argv in (["--help"], ["-h"], ["devices", "--help"], ["--lr", "1", "--help"]):
        result = run(*argv)
        assert (result.returncode, result.stderr) == (0, "")
        assert "--embed_dim" in result.stdout
    assert run("--version").stdout == f"cssm {cssm.__version__}\n"


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project.get("version", cssm.__version__) == cssm.__version__


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--embed_dimm", "3"], "did you mean --embed_dim?"),
        (["trian"], "did you mean train?"),
        (["--embed_dim", "33"], "type 32 or 34"),
        (["--lr", "-1"], "--lr -1: must be above 0"),
        (["--lr"], "needs a value"),
        (["--arch", "resnet"], "must be one of simple, vit, baseline, convnext, shvit"),
        (["--gpus", "0,x"], "for example 0,1"),
        (["--mem_fraction", "100"], "--mem_fraction 100: must be"),
        (["--image_size", "1"], "smaller than the stride of the stem"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read"),
        (["--config", "pyproject.toml", "--headless"], "pyproject.toml line 2: not YAML"),
        (["--arch", "a\nb"], "--arch a b: must be one of"),
        (["--mode", "flatten"], "is not accepted"),
        (["--arch", "simple", "--mlp_ratio", "2"], "does not apply"),
        (["devices", "--lr", "1"], "does not apply"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(argv, words):
    result = run(*argv)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_debug_shows_where_a_mistake_was_found():
    result = run("--embed_dim", "33", "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: --embed_dim 33")


def test_headless_leaves_stdout_to_json_whatever_else_prints():
    result = run("--lr", "0.5", "--headless", code=FAKE_TRAINING.replace("ENDING", "return {}"))
    assert result.returncode == 0
    assert [json.loads(line) for line in result.stdout.splitlines()] == [{"event": "config", "lr": 0.5}]
    assert set(result.stderr.splitlines()) == {"python prints", "a library prints", "a child prints"}


def test_without_headless_a_first_line_says_what_is_about_to_run():
    code = FAKE_TRAINING.replace("ENDING", "return {}")
    for argv, what in [
        ([], "simple hgru_bi on digits"),
        (["--arch=vit", "--cssm=gated", "--dataset=pathfinder"], "vit gated on pathfinder"),
        (["--arch=baseline"], "baseline on digits"),
        (["--resume=auto"], "resume auto"),
    ]:
        result = run(*argv, code=code)
        assert result.returncode == 0
        assert result.stdout.startswith(f"cssm {cssm.__version__}: {what}; loading JAX ...\n")
        assert "python prints" in result.stdout
    assert "loading" not in run("--quiet", code=code).stdout


@pytest.mark.parametrize(
    "ending, code, words",
    [
        ("raise KeyboardInterrupt", 130, "stopped by Ctrl-C"),
        ("from cssm.config import UserError; raise UserError('it is so', 5)", 5, "error: it is so"),
        ("from cssm.config import UserError; raise UserError('all is saved', 143)", 143, "all is saved"),
        (
            "raise OSError(28, 'No space left on device', 'runs/a')",
            6,
            "error: storage failed at runs/a: No space",
        ),
        (
            "raise PermissionError(13, 'Permission denied', 'runs')",
            6,
            "error: storage failed at runs: Permission",
        ),
        ("raise ModuleNotFoundError('No module named jax', name='jax')", 2, "error: jax is not installed here: type"),
        ("raise ModuleNotFoundError('No module named x', name='x')", 1, "error: this is a bug of the program"),
        ("raise FileNotFoundError(2, 'No such file', 'a')", 1, "error: this is a bug of the program"),
        ("raise ZeroDivisionError('by\\\\nzero')", 1, "error: this is a bug of the program"),
    ],
)
def test_every_ending_has_its_code_and_sentence(ending, code, words):
    result = run("--headless", "--lr=1", code=FAKE_TRAINING.replace("ENDING", ending))
    assert result.returncode == code
    assert words in result.stderr
    assert ("Traceback" in result.stderr) == (code == 1)
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["event"] == "error") == (code < 128)
    if code < 128:
        assert last["exit_code"] == code
        assert result.stderr.splitlines()[-1] == f"error: {last['message']}"


@pytest.mark.parametrize("argv", [["--help"], ["--lr=1"], ["--lr=1", "--quiet"], ["--lr=1", "--headless"]])
def test_output_that_nobody_reads_any_more_ends_the_program_quietly(argv):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-W", "error", "-c", FAKE_TRAINING.replace("ENDING", "return {}"), *argv]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert result.returncode == 141
    assert set(result.stderr.splitlines()) <= {"python prints", "a library prints", "a child prints"}


def test_output_that_cannot_be_written_is_told_once():
    code = FAKE_TRAINING.replace("ENDING", "return {}")
    command = [sys.executable, "-W", "error", "-c", code, "--lr=1", "--headless"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 6
    assert result.stderr.splitlines()[-1].startswith("error: storage failed: No space left on device")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("argv", [["--help"], ["--lr=1"], ["--lr=1", "--headless"]])
def test_a_program_started_without_stdout_runs_all_the_same(argv):
    ending = "print(os.open('main.py', os.O_RDONLY), file=sys.stderr); return {}"
    program = [sys.executable, "-W", "error", "-c", FAKE_TRAINING.replace("ENDING", ending), *argv]
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *program]
    result = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "1" not in result.stderr.splitlines(), "a file took the place of stdout"


class TestExplain:
    """The code and the advice for errors that other libraries raise."""

    def test_an_error_that_carries_a_code_keeps_it(self):
        assert cli.explain(UserError("so", exit_code=6), Config()) == (6, "so")

    def test_devices_that_are_not_there_are_a_mistake_of_the_users(self):
        from parallel.devices import DeviceError

        assert cli.explain(DeviceError("no such device"), Config()) == (2, "no such device")

    @pytest.mark.parametrize("kind", ["RESOURCE_EXHAUSTED", "INTERNAL: Error dispatching computation"])
    def test_out_of_memory_advises_the_same_effective_batch(self, kind):
        import jax

        error = jax.errors.JaxRuntimeError(f"{kind}: Out of memory allocating 9 bytes.")
        code, sentence = cli.explain(error, parse_args(["--batch_size=64"]).config)
        assert code == 3
        assert "type --batch_size 32 --grad_accum 2 (the same effective batch)" in sentence

    @pytest.mark.parametrize("flag", ["output", "explain", "checkpoint_dir", "cache_dir"])
    @pytest.mark.parametrize("at", ["a/b.csv", "a/b.csv.partial", "a"])
    def test_a_place_that_cannot_be_made_is_storage_and_names_its_flag(self, flag, at):
        error = FileNotFoundError(errno.ENOENT, "No such file or directory", at)
        sentence = f"storage failed at {at}: No such file or directory; make room or get permission"
        assert cli.explain(error, Config(**{flag: "a/b.csv"})) == (6, f"{sentence}, or choose another --{flag}")
        assert cli.explain(error, Config(**{flag: "c"}))[0] == 1, "a file is missing elsewhere"
        denied = PermissionError(errno.EACCES, "denied", at)
        assert cli.explain(denied, Config(**{flag: "c"}))[1].endswith("another --checkpoint_dir or --cache_dir")

    def test_other_errors_of_the_runtime_are_bugs(self):
        import jax

        assert cli.explain(jax.errors.JaxRuntimeError("INTERNAL: x"), Config())[0] == 1
        assert cli.explain(ValueError("RESOURCE_EXHAUSTED"), Config())[0] == 1


SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler=false"
PARTITIONING = "--xla_gpu_enable_allocator_spatial_partitioning=false"
OWN = SCHEDULER if version("jaxlib").startswith("0.10.") else f"{SCHEDULER} {PARTITIONING}"


@pytest.mark.parametrize(
    "argv, before, after",
    [
        ([], {}, {}),
        ([], {"XLA_FLAGS": "  "}, {}),
        ([], {"XLA_FLAGS": "--xla_a=1"}, {"XLA_FLAGS": f"{OWN} --xla_a=1"}),
        (
            [],
            {"XLA_FLAGS": f"--xla_a=1 {OWN}"},
            {"XLA_FLAGS": f"--xla_a=1 {OWN}"},
        ),  # of the process that began this one
        (["--xla_flags=--xla_b=2"], {"XLA_FLAGS": "--xla_a=1"}, {"XLA_FLAGS": f"{OWN} --xla_a=1 --xla_b=2"}),
        (["--xla_flags=--xla_b=2"], {}, {"XLA_FLAGS": f"{OWN} --xla_b=2"}),
        (["--deterministic"], {"XLA_FLAGS": "--a"}, {"XLA_FLAGS": f"{OWN} --a --xla_gpu_deterministic_ops=true"}),
        ([], {"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": "cpu"}),
        (["--platform=gpu"], {"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": "cuda"}),
        (["--platform=cpu"], {}, {"JAX_PLATFORMS": "cpu"}),
        (
            ["--mem_fraction=0.5"],
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"},
            {"XLA_CLIENT_MEM_FRACTION": "0.5"},
        ),
        (
            [],
            {"NCCL_RAS_ENABLE": "1", "TF_CPP_MIN_LOG_LEVEL": "0"},
            {"NCCL_RAS_ENABLE": "1", "TF_CPP_MIN_LOG_LEVEL": "0"},
        ),
        ([], {"CUDA_VISIBLE_DEVICES": "1,3"}, {"CUDA_VISIBLE_DEVICES": "1,3"}),
    ],
)
def test_the_environment_of_jax(argv, before, after):
    environ = dict(before)
    cli.set_environment(parse_args(argv).config, environ)
    assert environ == {"TF_CPP_MIN_LOG_LEVEL": "2", "NCCL_RAS_ENABLE": "0", "XLA_FLAGS": OWN} | after


@pytest.mark.parametrize(
    "jaxlib, flags",
    [("0.10.2", SCHEDULER), ("0.11.0", f"{SCHEDULER} {PARTITIONING}"), ("0.12.0.1", f"{SCHEDULER} {PARTITIONING}")],
)
def test_a_flag_is_for_a_jaxlib_that_knows_it(monkeypatch, jaxlib, flags):
    """XLA ends the process at a flag that it does not know; that ours are known here, every command shows."""
    monkeypatch.setattr(cli, "version", {"jaxlib": jaxlib}.get)
    environ: dict[str, str] = {}
    cli.set_environment(parse_args([]).config, environ)
    assert environ["XLA_FLAGS"] == flags


def test_jax_takes_the_share_of_memory(monkeypatch):
    """What a GPU is asked for, which needs none: jax refuses the variable beside its old name."""
    from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

    environ = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
    cli.set_environment(parse_args(["--mem_fraction=0.5"]).config, environ)
    monkeypatch.setattr(os, "environ", environ)
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5


def test_the_environment_is_set_before_training_is_imported():
    ending = "print(os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'], 'jax' in sys.modules); return {}"
    code = FAKE_TRAINING.replace("ENDING", ending)
    result = run("--xla_flags", "--xla_b=2", "--platform", "cpu", code=code, XLA_FLAGS="--xla_a=1")
    assert "--xla_a=1 --xla_b=2 cpu False" in result.stdout


@pytest.mark.parametrize("argv, reserved", [([], True), (["--dry_run"], False)])
def test_memory_is_reserved_before_training_is_imported_and_not_for_a_dry_run(argv, reserved):
    code = FAKE_TRAINING.replace("ENDING", "print('reserved with', os.environ.get('RESERVED')); return {}")
    (line,) = re.findall("reserved with.*", run("--xla_flags=--xla_b=2", *argv, code=code).stdout)
    assert ("--xla_b=2" in line) == reserved and (line == "reserved with None") != reserved


def test_python_users_import_the_names_from_the_package():
    code = "from cssm import Config; import sys; print('jax' in sys.modules, Config(lr=0.5).lr)\n"
    code += "from cssm import train; import cssm.training; assert train is cssm.training.train"
    result = run(code=code)
    assert result.stdout == "False 0.5\n", result.stderr
    with pytest.raises(AttributeError, match="no attribute 'trainn'"):
        _ = cssm.trainn
