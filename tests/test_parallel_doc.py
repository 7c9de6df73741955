"""docs/parallel.md says what is so: its numbers come out, its symptoms were provoked.

Every row of the troubleshooting table names, in a comment, a test that provokes what it shows. What it quotes is
written in the sources; what takes no time to provoke is compared word for word here.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cssm import cli, models
from cssm.config import KNOBS, Config, UserError, parse_args
from cssm.flags import SHORTHANDS
from cssm.memory import out_of_memory
from cssm.models.blocks import Norm
from cssm.recipes import scaled_lr
from parallel import job
from parallel.devices import AXIS, resolve_batch, select_devices, spmd
from parallel.find import find_job
from parallel.job import Job
from parallel.places import local_places
from parallel.sharded import make_strategy

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "parallel.md").read_text()
# --ntasks-per-node of srun, --shm-size of docker
FLAGS_OF_OTHERS = ("ntasks", "shm")
SOURCES = [*ROOT.glob("cssm/**/*.py"), *ROOT.glob("parallel/**/*.py")]


def tables() -> list[list[list[str]]]:
    """The cells of every table, header first, the line of dashes left out."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()]
        found.append([row for row in rows if not set("".join(row)) <= set("-|")])
    return found


def table(*columns: str) -> list[list[str]]:
    """The rows of the one table with these last columns, without them."""
    (chosen,) = [rows for rows in tables() if tuple(rows[0][-len(columns) :]) == columns]
    return chosen[1:]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# The numbers


@pytest.mark.parametrize("row", table("devices", "batch_size", "grad_accum", "effective batch"), ids=lambda row: row[0])
def test_the_batch_arithmetic_is_that_of_the_program(row):
    (typed,), numbers = quoted(row[0]), [int(cell) for cell in row[1:]]
    config = parse_args(typed.split()).config
    sizes = (config.batch_size, config.global_batch_size, config.grad_accum)
    batching = resolve_batch(numbers[0], *sizes, default_batch_size=config.batch_size or 1)
    assert [batching.devices, batching.batch_size, batching.grad_accum, batching.effective] == numbers


def test_the_learning_rates_are_those_of_the_program():
    header, *rows = next(rows for rows in tables() if "--base_batch_size" in rows[0][0])
    base, batches = quoted(header[0])[0], [int(cell) for cell in header[1:]]
    assert len(rows) == 2
    for row in rows:
        config = parse_args(f"{base} {quoted(row[0])[0]}".split()).config
        assert row[1:] == [f"{scaled_lr(config, batch)[0]:.3g}" for batch in batches]


def test_the_memory_is_what_the_strategies_hold():
    """On eight devices, from the shapes of the state: nothing is computed."""
    config = Config.from_preset("base", dataset="pathfinder", pathfinder_difficulty="14")
    images = jnp.zeros((1, config.image_size, config.image_size, 1))
    params = jax.eval_shape(models.build(config, 2).init, jax.random.key(0), images)["params"]
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert f"P = {count:,}" in PAGE
    from optax import scale_by_adam

    for shard, said in table("MB per device"):
        strategy = make_strategy(shard, "auto", jax.devices(), 0.0)
        state = jax.eval_shape(lambda params, by=strategy: by.init(scale_by_adam(), params, 0), params)
        held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        assert f"{held / 1e6:,.0f}" == said


# Batch norm


def test_batch_norm_depends_on_the_devices_unless_synchronised():
    """The same eight images on one device and on four."""
    images = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def normalised(devices, axis=None):
        norm = Norm("batch", jnp.float32, axis)(True, "norm")
        variables = norm.init(jax.random.key(0), images)
        forward = spmd(lambda x: norm.apply(variables, x, mutable="batch_stats")[0], jax.devices()[:devices])
        return np.asarray(forward(images.reshape(devices, -1, 3))).reshape(images.shape)

    one = normalised(1)
    assert np.abs(normalised(4) - one).max() > 0.1
    np.testing.assert_allclose(normalised(4, AXIS), one, rtol=1e-5, atol=1e-5)


# What is named


def test_flags_and_files_that_are_named_exist(monkeypatch):
    for name in re.findall(r"(?<!\S)`?--(?:no_)?([a-z_0-9]+)", PAGE):
        assert name in {*KNOBS, *SHORTHANDS, "config", *FLAGS_OF_OTHERS}, name
    for path in re.findall(r"(?:configs|parallel|cssm|docs|tests)/[\w/]+\.\w+", PAGE):
        assert (ROOT / path).exists(), path


# The troubleshooting table

ROWS = {row[0]: row for row in table("you see", "why", "what to type")}


def sentences(tree: ast.AST) -> Iterator[str]:
    """Every text of a syntax tree; where the program puts something in, a zero byte."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


WRITTEN = [text for path in SOURCES for text in sentences(ast.parse(path.read_text()))]


def is_written(quote: str) -> bool:
    """Whether one text of the sources holds, in this order, what the quote's ... leave."""
    pattern = ".*".join(re.escape(piece.strip()) for piece in quote.split("..."))
    return any(re.search(pattern, text, re.DOTALL) for text in WRITTEN)


def mistake(function: Callable, *args: object, **options: object) -> str:
    with pytest.raises((UserError, ValueError, RuntimeError)) as caught:
        function(*args, **options)
    return str(caught.value)


def _no_coordinator() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "JOIN_TIMEOUT_S", 0)
        return mistake(job._wait_for, Job("flags", 2, 1, "127.0.0.1:1"), "127.0.0.1", 1)


def _started_alone() -> str:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return mistake(cli._places, Config(sync_backend="cpu"))


FOUR_GPUS = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}

# By row: how to get what it quotes, word for word; ... stands for any words.
PROVOKED: dict[str, Callable[[], str]] = {
    "batch-divides": lambda: mistake(resolve_batch, 3, None, 64, None, 32),
    "batch-agrees": lambda: mistake(resolve_batch, 4, 8, 64, 4, 32),
    "no-such-gpu": lambda: mistake(select_devices, gpus="0,9"),
    "nccl-off-gpu": lambda: mistake(make_strategy, "none", "nccl", jax.devices(), 0.0),
    "cpu-backend": lambda: mistake(Config, sync_backend="cpu", shard="optimizer"),
    "whole-arrays": lambda: mistake(Config, optimizer="muon", shard="optimizer"),
    "one-or-many": lambda: mistake(Config, multi_gpu="off", nproc_per_node="2"),
    "by-hand": lambda: mistake(Config, num_processes=2),
    "half-a-job": lambda: mistake(find_job, {"RANK": "0", "WORLD_SIZE": "2"}),
    "started-alone": _started_alone,
    "uneven-processes": lambda: mistake(local_places, "3", FOUR_GPUS),
    "no-coordinator": _no_coordinator,
    "out-of-memory": lambda: out_of_memory(Config(arch="vit", batch_size=64)),
    "accuracy-differs": lambda: str(scaled_lr(Config(), 128)[1]),
    "diverges": lambda: str(scaled_lr(Config(lr_scale="linear", warmup_steps=0), 128)[1]),
}


def test_the_table_covers_what_happens():
    assert len(ROWS) >= 20
    assert PROVOKED.keys() <= ROWS.keys()


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_a_test_that_exists(row):
    named = re.findall(r"<!-- (\w+\.py)::(test_\w+) -->", ROWS[row][-1])
    assert named, "no test provokes this"
    for file, function in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_what_a_row_quotes_is_said_by_the_program(row):
    quotes = quoted(ROWS[row][1])
    if row in PROVOKED:
        (quote,) = quotes
        said = PROVOKED[row]()
        assert re.fullmatch(".+".join(re.escape(piece) for piece in quote.split("...")), said), said
    else:
        assert all(is_written(quote) for quote in quotes), quotes


def test_a_sentence_that_nobody_writes_is_noticed():
    assert is_written("--num_devices ... contradicts the ... of --gpus: type one of them")
    assert not is_written("--num_devices ... contradicts the ... of --gpus: choose one of them")
    assert not is_written("type one of them ... --num_devices")
