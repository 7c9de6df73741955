"""Out of memory: recognised, told with numbers, and answered with flags that keep the effective batch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from cssm.config import Config, parse_args
from cssm.memory import is_out_of_memory, memory_in_use, out_of_memory
from cssm.training import train
from parallel.batches import resolve_batch

ROOT = Path(__file__).resolve().parents[1]
# A matrix of 4,800 TB: more than a process can address, so that no machine has room for it.
ABSURD = {"arch": "baseline", "depth": 1, "num_heads": 4, "embed_dim": 20_000_000, "max_steps": 1}


@pytest.mark.parametrize(
    "error,expected",
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."), True),
        (
            jax.errors.JaxRuntimeError("INTERNAL: Error dispatching computation: Out of memory allocating 9 bytes."),
            True,
        ),
        (jax.errors.JaxRuntimeError("INTERNAL: failed to allocate: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: Failed to create cuFFT batched plan with scratch allocator"), True),
        (MemoryError("Unable to allocate 119. GiB"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: x"), False),
        (ValueError("RESOURCE_EXHAUSTED"), False),
    ],
)
def test_only_a_lack_of_memory_counts(error, expected):
    assert is_out_of_memory(error) is expected


def advice(*argv: str) -> str:
    return out_of_memory(parse_args(argv).config)


def test_what_the_error_said_is_told_by_its_first_line():
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: trying to allocate 71.92GiB{'.' * 200}\nmore")
    told, said = out_of_memory(Config(), error).split("; it said: ")
    assert told == out_of_memory(Config())
    assert said.startswith("RESOURCE_EXHAUSTED: trying to allocate 71.92GiB..") and len(said) == 150
    assert out_of_memory(Config(), MemoryError()) == told


@pytest.mark.parametrize(
    "argv,expected",
    [
        ("--batch_size=64", "with 64 images per device: type --batch_size 32 --grad_accum 2 (the same"),
        ("--batch_size=8 --grad_accum=3", "type --batch_size 4 --grad_accum 6 (the same"),
        ("--batch_size=9", "type --batch_size 3 --grad_accum 3 (the same"),
        ("--batch_size=7", "type --batch_size 1 --grad_accum 7 (the same"),
        ("--batch_size=8 --global_batch_size=64", "type --batch_size 4 (the same"),
        ("--batch_size=8 --global_batch_size=128 --grad_accum=2", "type --batch_size 4 --grad_accum 4 (the same"),
        ("--global_batch_size=64", "with 8 images per device: type --grad_accum 2 (the same"),
        ("--global_batch_size=64 --num_devices=4 --grad_accum=2", "with 8 images per device: type --grad_accum 4 (the"),
        ("--batch_size=1", "with one image per device: type --shard optimizer or --shard params, or --bf16"),
        ("--batch_size=1 --bf16 --multi_gpu=off", "with one image per device: type a smaller --embed_dim"),
        ("--arch=vit --bf16 --batch_size=1 --num_devices=1", "type --remat"),
        ("--batch_size=1 --shard=optimizer", "type --shard params, or --bf16"),
        ("--batch_size=1 --shard=params", "type --bf16"),
        ("--batch_size=1 --optimizer=muon", "type --bf16"),
        ("--resume=auto", "--shard optimizer or --shard params (where --optimizer is not lamb or muon)"),
        ("--batch_size=1 --sync_backend=cpu", "type --bf16"),
        ("--resume=auto", "memory: type half the --batch_size with twice the --grad_accum (the same effective batch)"),
    ],
)
def test_the_advice_fits_what_was_typed(argv, expected):
    assert expected in advice(*argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "--batch_size=64",
        "--batch_size=15 --grad_accum=2",
        "--global_batch_size=192",
        "--batch_size=15 --global_batch_size=240",
        "--batch_size=15 --grad_accum=2 --global_batch_size=240",
    ],
)
def test_the_advice_keeps_the_effective_batch(argv):
    def batching(*argv):
        config = parse_args(argv).config
        return resolve_batch(8, config.batch_size, config.global_batch_size, config.grad_accum, 0)

    flags = advice(*argv.split()).split("type ")[1].split(" (the same")[0].split()
    before, after = batching(*argv.split()), batching(*argv.split(), *flags)
    assert after.effective == before.effective
    assert after.batch_size < before.batch_size


@pytest.mark.parametrize(
    "stats,expected",
    [
        ([{"bytes_in_use": 2**30, "bytes_limit": 2**32}], " (in use: device 0 1.0 of 4.0 GiB)"),
        ([{"bytes_in_use": 2**30, "bytes_limit": 2**32}] * 4, " (in use: 1.0 of 4.0 GiB on each of 4 devices)"),
        (
            [{"bytes_in_use": n * 2**30, "bytes_limit": 2**32} for n in (1, 3)],
            " (in use: device 0 1.0 of 4.0 GiB, device 1 3.0 of 4.0 GiB)",
        ),
        ([{}, {}], ""),
    ],
)
def test_each_device_tells_what_it_has_in_use(stats, expected):
    assert memory_in_use(stats) == expected


@pytest.mark.slow
def test_a_model_that_fits_nowhere_is_out_of_memory(tmp_path):
    config = Config(**ABSURD, num_devices=2, quiet=True, checkpoint_dir=str(tmp_path))
    with pytest.raises(jax.errors.JaxRuntimeError) as refused:
        train(config)
    assert is_out_of_memory(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_program_ends_with_code_3_and_one_sentence(tmp_path, devices):
    flags = [f"--{name}={value}" for name, value in ABSURD.items()]
    flags += [f"--checkpoint_dir={tmp_path}", f"--num_devices={devices}"]
    command = [sys.executable, "-W", "error", "main.py", *flags]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 3
    (sentence,) = result.stderr.splitlines()
    shard = ", or --shard optimizer or --shard params" if devices > 1 else ""
    told, said = sentence.split("; it said: ")
    assert told == (
        "error: out of memory with 32 images per device: type --batch_size 16 --grad_accum 2 "
        f"(the same effective batch), or --remat{shard}, or --bf16"
    )
    assert re.search("out of memory", said, re.IGNORECASE)
