"""Trunks: each maps images [B, H, W, C] or clips [B, T, H, W, C] to logits [B, num_classes]."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax.numpy as jnp

from cssm.cells import CELLS
from cssm.cells.core import CellOptions
from cssm.config import Config
from cssm.models.blocks import Attention, Norm
from cssm.models.simple import Simple
from cssm.models.vit import ViT
from cssm.positions import ROPE_MODES
from cssm.scan import Method
from cssm.spectral import Backend

T = TypeVar("T")

MODELS = {"simple": Simple, "vit": ViT, "baseline": ViT}


def in_block(name: str) -> bool:
    """Whether a top-level entry of the parameters belongs to a block, that is, to what `wrap_block` wraps."""
    return name.startswith(("block_", "cell_"))


def build(
    config: Config,
    num_classes: int,
    wrap_block: Callable | None = None,
    dtype: Any = None,
    bn_axis: str | None = None,
) -> nn.Module:
    """The model that the configuration describes.

    dtype: of activations, in place of the configuration's (float64 for an oracle).
    wrap_block: class -> class, applied to the trunk's block, in simple to the cell; rematerialisation and the
    gathering of parameters come in here, and names of parameters do not depend on it. bn_axis: device axis over
    which batch norm takes its statistics. The module's call is `module(images, train=False)`; it draws from the rng
    stream "drop_path" when training with a drop-path rate.
    """
    dtype = dtype or (jnp.bfloat16 if config.dtype == "bf16" else jnp.float32)
    wrap_cell = (config.arch == "simple" and wrap_block) or (lambda cell: cell)
    mixer = _attention(config, dtype) if config.arch == "baseline" else _cell(config, dtype, wrap_cell)
    common = {
        "mixer": mixer,
        "num_classes": num_classes,
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "seq_len": config.seq_len or 1,
        "stem_mode": config.stem_mode,
        "pos_embed": config.pos_embed,
        "norm": Norm(config.norm_type, dtype, bn_axis),
        "pool_type": config.pool_type,
        "dtype": dtype,
    }
    if config.arch == "simple":
        return Simple(stem_layers=config.stem_layers, **common)
    return ViT(
        patch_size=config.patch_size,
        stem_stride=config.stem_stride or 1,  # patches have none
        mlp_ratio=_known(config.mlp_ratio),
        drop_path_rate=config.drop_path_rate,
        layer_scale_init=_known(config.layer_scale_init),
        recurrent=config.arch != "baseline",
        wrap_block=wrap_block,
        **common,
    )


def _cell(config: Config, dtype, wrap: Callable) -> Callable[..., nn.Module]:
    options = CellOptions(
        channels=_known(config.embed_dim),
        kernel_size=_known(config.kernel_size),
        kernel_domain=config.kernel_domain,
        kernel_origin=config.kernel_origin,
        gate_type=_known(config.gate_type),
        rope_mode=config.pos_embed if config.pos_embed in ROPE_MODES else "none",
        scan=cast(Method, config.scan),
        backend=cast(Backend, config.spectral_backend),
        dtype=dtype,
    )
    ablations = {
        "hgru_bi": {"readout_state": config.readout_state},
        "gated": {
            "short_conv_size": config.short_conv_size,
            "short_conv_spatial_size": config.short_conv_spatial_size,
        },
    }[config.cssm]
    cell = wrap(CELLS[config.cssm])
    return lambda name: cell(options, name=name, **ablations)


def _attention(config: Config, dtype) -> Callable[..., nn.Module]:
    num_heads = _known(config.num_heads)
    return lambda name: Attention(num_heads, dtype, name=name)


def _known(value: T | None) -> T:
    """A setting that a complete configuration has wherever it applies."""
    assert value is not None
    return value
