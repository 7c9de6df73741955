"""The peer of a benchmark: the attention baseline in PyTorch, as timm builds it, with the usual fast settings.

AdamW (fused on a GPU), autocast to bfloat16 with --dtype bf16, TF32 otherwise, torch.compile on a GPU, and
DistributedDataParallel over several devices. Its batch stays on the devices, which favours it. torch is loaded in the
processes that measure, and nowhere else.
"""

import importlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from cssm.apart import ranks
from cssm.config import Config, UserError

NEEDED = ("torch", "timm")


def check_installed(needed: Sequence[str] = NEEDED) -> None:
    """Raise UserError unless these packages are here."""
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"--peer torch needs {' and '.join(needed)}, and {missing[0]} is not installed here: "
            f"type pip install {' '.join(missing)}, or leave --peer out"
        )


@dataclass(frozen=True)
class Task:
    """What each rank does. indices: of the GPUs, empty on a CPU; batch_size: of each device."""

    config: Config
    image_shape: tuple[int, int, int]
    num_classes: int
    batch_size: int
    devices: int
    indices: tuple[int, ...]
    burn_in: int
    store: str = ""


def measure(task: Task) -> dict[str, Any]:
    """As cssm.measure.timed tells it for ours; what only that has is left out."""
    with tempfile.TemporaryDirectory() as folder:
        return ranks(_rank, task.devices, replace(task, store=str(Path(folder) / "store")))[0]


def _rank(rank: int, task: Task) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    place = torch.device("cuda", task.indices[rank]) if task.indices else torch.device("cpu")
    if task.indices:
        if not torch.cuda.is_available():
            raise UserError("--peer torch: this PyTorch has no CUDA, install one that has, or leave --peer out")
        torch.cuda.set_device(place)
        torch.set_float32_matmul_precision("high")
    if task.devices > 1:
        torch.distributed.init_process_group(
            "nccl" if task.indices else "gloo", f"file://{task.store}", rank=rank, world_size=task.devices
        )
    try:
        return timed(task, step_of(torch, task, place), lambda: _wait(torch, task), _peak(torch, task))
    except torch.OutOfMemoryError:
        return {"out_of_memory": f"PyTorch is out of memory with {task.batch_size} images per device"}
    finally:
        if task.devices > 1:
            torch.distributed.destroy_process_group()


def step_of(torch: Any, task: Task, place: Any) -> Callable[[], Any]:
    """One training step, which returns its loss on the device."""
    config = task.config
    model = build(task).to(place)
    if task.devices > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[place] if task.indices else None)
    if task.indices:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=bool(task.indices),
    )
    height, width, channels = task.image_shape
    shape = (task.batch_size, channels, height, width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=place)
    labels = torch.randint(0, task.num_classes, (task.batch_size,), device=place)

    def step() -> Any:
        with torch.autocast(place.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16"):
            logits = model(images.float() / 127.5 - 1.0)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        return loss.detach()

    return step


def build(task: Task) -> Any:
    """timm's vision transformer of the size that the configuration describes."""
    config, timm = task.config, importlib.import_module("timm.models.vision_transformer")
    return timm.VisionTransformer(
        img_size=task.image_shape[:2],
        patch_size=config.patch_size,
        in_chans=task.image_shape[2],
        num_classes=task.num_classes,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
        init_values=config.layer_scale_init,
        class_token=False,
        global_pool="avg",
    )


def timed(task: Task, step: Callable[[], Any], wait: Callable[[], None], peak: Callable[[], int | None]) -> dict:
    """The same schedule as for ours: burn-in, steps that are waited for one by one, steps that are not."""
    start = time.perf_counter()
    step()
    wait()
    compile_s = time.perf_counter() - start
    alone_ms = []
    for _ in range(task.burn_in - 1 + task.config.steps):
        start = time.perf_counter()
        step()
        wait()
        alone_ms.append(1e3 * (time.perf_counter() - start))
    start = time.perf_counter()
    loss = [step() for _ in range(task.config.steps)][-1]
    wait()
    seconds = time.perf_counter() - start
    lower, median, upper = quantiles(alone_ms[task.burn_in - 1 :], n=4, method="inclusive")
    effective = task.batch_size * task.devices
    return {
        "devices": task.devices,
        "batch_size": task.batch_size,
        "grad_accum": 1,
        "effective_batch": effective,
        "compile_s": compile_s,
        "step_ms": median,
        "step_ms_quartiles": [lower, upper],
        "images_per_s": effective * task.config.steps / seconds,
        "loss": float(loss),
        "peak_bytes_per_device": peak(),
    }


def _wait(torch: Any, task: Task) -> None:
    if task.indices:
        torch.cuda.synchronize()


def _peak(torch: Any, task: Task) -> Callable[[], int | None]:
    return lambda: torch.cuda.max_memory_allocated() if task.indices else None
