"""What XLA makes of a training step on a GPU that is not here: `python tests/aot/compile_step.py FLAGS`, as of train.

Needs `pip install "jax[cuda13]"` of the jax that is installed, and no driver. The step is compiled for --num_devices
(1) devices of the kind below. Printed are its kernels that give SHOWN bytes or more, in their order, and what its
buffers take by XLA's assignment, beside the estimate of --dry_run. Nothing is timed, and no algorithm is chosen by
trial, as it is on a card. With XLA_FLAGS=--xla_dump_to=DIR all that XLA tells of the program is there too.
"""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver whose version could be checked
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cssm.config import parse_args
from cssm.report import Reporter
from cssm.runs import Run
from cssm.setup import Setup, set_up
from cssm.step import Sums, make_backward, make_finish
from parallel import devices as par
from parallel import sharded, sync

SHOWN = 20_000_000
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 4814900000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150110011392
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
MEMORY = 3 * 150_110_011_392 // 4  # what jax takes of it
SIZES = {"pred": 1, "u8": 1, "s32": 4, "u32": 4, "bf16": 2, "f32": 4, "c64": 8}
KERNEL = re.compile(r"\s*(?:ROOT )?%(\S+) = (.*?) (?:fusion|custom-call|convolution|copy|all-\S+|reduce-scatter\S*)\(")


def compiled(setup: Setup, devices: list[Any]) -> jax.stages.Compiled:
    """The step of training, each argument with a leading dim of the devices."""
    config, batching = setup.config, setup.batching
    backward = make_backward(setup.step_model, setup.strategy, config, batching.grad_accum)
    step = setup.strategy.program(backward, make_finish(setup.tx, setup.strategy, config), devices)
    mesh, split = Mesh(np.asarray(devices), (par.AXIS,)), PartitionSpec(par.AXIS)

    def on_each_device(*arguments):
        rows = jax.tree.map(lambda x: x[0], arguments)
        return jax.tree.map(lambda x: x[None], step(*rows))

    def shape(x):
        return jax.ShapeDtypeStruct((len(devices), *x.shape), x.dtype, sharding=NamedSharding(mesh, split))

    batch = setup.batch_shapes(batching.batch_size * batching.grad_accum)
    arguments = jax.tree.map(shape, (setup.layout, jax.eval_shape(Sums.zeros), batch))
    program = jax.shard_map(on_each_device, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return jax.jit(program, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def bytes_of(shapes: str) -> int:
    """Of the arrays in the text of a shape or of a tuple of shapes."""
    arrays = re.findall(rf"({'|'.join(SIZES)})\[([\d,]*)\]", shapes)
    return sum(SIZES[dtype] * int(np.prod([int(n) for n in dims.split(",") if n] or [1])) for dtype, dims in arrays)


def pretended(devices: list[Any]) -> Iterator[tuple[Any, str, Any]]:
    """(object, name, value): what asks for the device that runs is told of the one that the step is compiled for."""
    yield jax, "default_backend", lambda: "gpu"
    yield par, "select_devices", lambda *asked: devices
    yield par, "memory_limit", lambda devices: MEMORY
    for module in (sync, sharded):
        yield module, "spmd", lambda fn, devices, **how: fn
    for name, module in list(sys.modules.items()):
        if name.startswith("cssm.") and hasattr(module, "available"):
            yield module, "available", lambda: True


def main(argv: list[str]) -> None:
    """See the module."""
    config = parse_args(["train", *argv]).config
    number = config.num_devices or 1
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{number}")
    devices = list(topology.devices)
    with ExitStack() as pretence:
        for target, name, value in pretended(devices):
            pretence.enter_context(patch.object(target, name, value))
        report = pretence.enter_context(Reporter(None, primary=True))
        setup = set_up(Run(Path(), config, resumed=False), devices, report, load=False)
        began = time.monotonic()
        program = compiled(setup, devices)
        seconds, costs = time.monotonic() - began, setup.costs(setup.layout)
    tell(program, seconds, setup.batching.batch_size * setup.batching.grad_accum, costs["activation_bytes"] or 0)


def tell(program: jax.stages.Compiled, seconds: float, images: int, estimate: int) -> None:
    """See the module; estimate: bytes."""
    text, memory = program.as_text() or "", program.memory_analysis()
    assert memory is not None
    for line in text[text.index("\nENTRY") :].splitlines():
        found = KERNEL.match(line)
        if found and bytes_of(found[2]) >= SHOWN:
            where = re.search(r'op_name="([^"]+)"', line)
            print(f"{bytes_of(found[2]) / 1e6:8,.0f} MB  {found[1]:40} {where[1] if where else ''}")
    temporary = memory.temp_size_in_bytes / 1e9
    print(f"traced, lowered and compiled in {seconds:.0f} s; arguments {memory.argument_size_in_bytes / 1e9:.3f} GB")
    print(
        f"temporary {temporary:.3f} GB, {temporary / images:.4f} an image; --dry_run: activations {estimate / 1e9:.3f}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
