"""PyTorch's side of a benchmark, as far as it can be seen without PyTorch: a stand-in records what it is asked for.

Where torch and timm are installed, the last test trains with them.
"""

import importlib.util
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from cssm import cli
from cssm import peer as module
from cssm.config import UserError, resolve
from cssm.peer import NEEDED, Task, check_installed, step_of, timed

BASELINE = {"arch": "baseline", "stem_mode": "patch", "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}


def task(devices=1, indices=(), **settings):
    config = resolve({**BASELINE, "peer": "torch", "steps": 3, **settings}, {})
    return Task(config, (16, 16, 1), 10, batch_size=4, devices=devices, indices=indices, burn_in=5)


def test_what_is_missing_is_named_before_anything_is_measured(monkeypatch, capsys):
    present = {"torch"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in present else None)
    with pytest.raises(UserError, match="needs torch and timm, and timm is not installed here: type pip install timm"):
        check_installed()
    present.add("timm")
    check_installed()
    present.clear()
    flags = [f"--{name}={value}" for name, value in BASELINE.items()]
    assert cli.main(["bench", *flags, "--peer", "torch"]) == 2
    error = capsys.readouterr().err
    assert "torch is not installed here: type pip install torch timm, or leave --peer out" in error
    assert len(error.splitlines()) == 1


@pytest.fixture
def torch(monkeypatch):
    """A stand-in that takes every call; `build` gives a model of it."""
    stand_in = MagicMock()
    monkeypatch.setattr(module, "build", lambda task: stand_in.model)
    return stand_in


def test_on_a_gpu_it_is_compiled_and_its_optimizer_fused(torch):
    step_of(torch, task(indices=(0,), weight_decay=0.05, lr=2e-3), torch.device("cuda", 0))()
    assert torch.compile.call_count == 1 and not torch.nn.parallel.DistributedDataParallel.called
    given = torch.optim.AdamW.call_args.kwargs
    assert given == {"lr": 2e-3, "betas": (0.9, 0.999), "weight_decay": 0.05, "fused": True}


def test_on_a_cpu_it_is_neither(torch):
    step_of(torch, task(), torch.device("cpu"))()
    assert not torch.compile.called and torch.optim.AdamW.call_args.kwargs["fused"] is False


def test_several_devices_average_their_gradients(torch):
    place = torch.device("cuda", 3)
    step_of(torch, task(2, (2, 3)), place)
    assert torch.nn.parallel.DistributedDataParallel.call_args.kwargs == {"device_ids": [place]}
    assert torch.compile.call_args.args == (torch.nn.parallel.DistributedDataParallel.return_value,)
    step_of(torch, task(2), torch.device("cpu"))
    assert torch.nn.parallel.DistributedDataParallel.call_args.kwargs == {"device_ids": None}


@pytest.mark.parametrize("dtype,on", [("bf16", True), ("f32", False)])
def test_a_step_casts_as_told_clips_and_updates_in_this_order(torch, dtype, on):
    step_of(torch, task(dtype=dtype, grad_clip=0.5, label_smoothing=0.1), torch.device("cpu"))()
    assert torch.autocast.call_args.kwargs == {"dtype": torch.bfloat16, "enabled": on}
    entropy = torch.nn.functional.cross_entropy
    assert entropy.call_args.kwargs == {"label_smoothing": 0.1}
    assert torch.nn.utils.clip_grad_norm_.call_args.args[1] == 0.5
    names = [name for name, *_ in torch.mock_calls]
    order = ("zero_grad", "backward", "clip_grad_norm_", "step")
    found = [next(o for o in order if name.endswith(o)) for name in names if name.endswith(order)]
    assert found == list(order)
    torch.reset_mock()
    step_of(torch, task(grad_clip=0.0), torch.device("cpu"))()
    assert not torch.nn.utils.clip_grad_norm_.called


@pytest.fixture
def rank(torch, monkeypatch):
    """One rank of a task, with the stand-in in the place of PyTorch; its steps take no time."""
    torch.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
    torch.cuda.max_memory_allocated.return_value = 5
    monkeypatch.setitem(sys.modules, "torch", torch)
    return module._rank


def test_ranks_meet_and_part(rank, torch):
    row = rank(1, task(2, (4, 6)))
    group, (args, kwargs) = torch.distributed, torch.distributed.init_process_group.call_args
    assert args[0] == "nccl" and kwargs == {"rank": 1, "world_size": 2}
    assert group.destroy_process_group.call_count == 1
    assert torch.device.call_args.args == ("cuda", 6) and row["peak_bytes_per_device"] == 5
    assert torch.set_float32_matmul_precision.call_args.args == ("high",), "TF32, as XLA has it"
    assert torch.cuda.synchronize.call_count == 5 + 3 + 1
    rank(0, task(2))
    assert group.init_process_group.call_args.args[0] == "gloo"


def test_alone_there_is_nobody_to_meet(rank, torch):
    assert rank(0, task())["peak_bytes_per_device"] is None
    assert not torch.distributed.init_process_group.called and not torch.cuda.synchronize.called


def test_a_lack_of_memory_is_an_answer(rank, torch):
    torch.nn.functional.cross_entropy.side_effect = torch.OutOfMemoryError("CUDA out of memory")
    assert rank(0, task(2, (0, 1))) == {"out_of_memory": "PyTorch is out of memory with 4 images per device"}
    assert torch.distributed.destroy_process_group.call_count == 1


def test_a_pytorch_without_cuda_is_refused_on_a_gpu(rank, torch):
    torch.cuda.is_available.return_value = False
    with pytest.raises(UserError, match="this PyTorch has no CUDA"):
        rank(0, task(1, (0,)))


def test_the_model_is_of_the_same_size(monkeypatch):
    made = MagicMock()
    monkeypatch.setitem(sys.modules, "timm", MagicMock())
    monkeypatch.setitem(sys.modules, "timm.models", MagicMock())
    monkeypatch.setitem(sys.modules, "timm.models.vision_transformer", made)
    module.build(task(mlp_ratio=3.0, layer_scale_init=0.1))
    given = made.VisionTransformer.call_args.kwargs
    assert given == {
        "img_size": (16, 16),
        "patch_size": 4,
        "in_chans": 1,
        "num_classes": 10,
        "embed_dim": 8,
        "depth": 1,
        "num_heads": 2,
        "mlp_ratio": 3.0,
        "init_values": 0.1,
        "class_token": False,
        "global_pool": "avg",
    }


def test_its_schedule_is_ours(monkeypatch):
    """Burn-in, as many steps waited for one by one, as many that are not."""
    clock, calls = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)

    def step():
        calls.append("step")
        clock.now += 0.5
        return 1.25

    row = timed(task(2), step, lambda: calls.append("wait"), lambda: 7)
    assert calls == ["step", "wait"] * (5 + 3) + ["step"] * 3 + ["wait"]
    assert (row["step_ms"], row["step_ms_quartiles"], row["compile_s"]) == (500.0, [500.0, 500.0], 0.5)
    assert (row["images_per_s"], row["loss"], row["peak_bytes_per_device"]) == (2 * 4 / 0.5, 1.25, 7)
    assert (row["devices"], row["batch_size"], row["effective_batch"]) == (2, 4, 8)


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"stem_mode": "conv", "patch_size": 16}, "--peer torch does not apply with --stem_mode conv"),
        ({"optimizer": "sgd"}, "--peer torch does not apply with --optimizer sgd"),
        ({"shard": "optimizer"}, "--peer torch does not apply with --shard optimizer"),
        ({"grad_accum": 2}, "without --grad_accum: leave one of the two out"),
        ({"ema_decay": 0.9}, "without --ema_decay"),
        ({"temporal_attn_every": 1}, "without --temporal_attn_every"),
        ({"remat": True}, "without --remat"),
        ({"mixup": 0.2}, "without --mixup"),
        ({"rand_augment": "m9-n2"}, "without --rand_augment"),
        ({"dataset": "npz", "data_dir": "x", "image_size": 16, "flip": True}, "without --flip"),
    ],
)
def test_what_it_does_not_do_is_refused(settings, words):
    with pytest.raises(UserError) as refused:
        task(**settings)
    assert words in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_real_steps_are_timed_where_there_is_a_pytorch(devices):
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        with pytest.raises(UserError, match="is not installed here"):
            check_installed()
        return
    row = module.measure(task(devices))
    assert row["images_per_s"] > 0 and 0 < row["loss"] < 10 and row["devices"] == devices
