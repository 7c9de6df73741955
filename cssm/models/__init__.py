"""Trunks: each maps images [B, H, W, C] or clips [B, T, H, W, C] to logits [B, num_classes]."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax.numpy as jnp

from cssm.cells import CELLS
from cssm.cells.attention import SelfAttention
from cssm.cells.core import CellOptions
from cssm.config import Config
from cssm.models.blocks import ACTIVATIONS, Norm
from cssm.models.convnext import ConvNeXt
from cssm.models.shvit import SHViT
from cssm.models.simple import Simple
from cssm.models.vit import ViT
from cssm.positions import ROPE_MODES
from cssm.scan import Method
from cssm.spectral import Backend
from cssm.stages import stages

T = TypeVar("T")

# What a cell takes besides CellOptions, and the settings that hold it; None leaves the cell's own default.
_READOUT, _CONVS = {"readout_state": "readout_state"}, {"short_conv_size": "short_conv_size"}
_SPACE = {"short_conv_spatial_size": "short_conv_spatial_size"}
_GDN = ("delta_key_dim", "output_norm", "output_gate_act", "qkv_conv_size", "qkv_conv_full", "cross_freq_conv_size")
_GDN += ("spectral_clip",)
_TRANSFORMER = ("asymmetric_qk", "feedback", "k_state", "use_layernorm", "spectral_clip")
ABLATIONS: dict[str, dict[str, str]] = {
    "hgru_bi": _READOUT,
    "hgru": _READOUT,
    "opponent": {**_READOUT, "gate_activation": "gate_activation", "gate_rank": "gate_rank"},
    "gated": {**_CONVS, **_SPACE},
    "no_fft": {**_CONVS, **_SPACE},
    "gdn": {**_CONVS, "use_input_gates": "input_gates", "use_spectral_l2_norm": "spectral_l2_norm"}
    | {name: name for name in _GDN},
    "transformer": {**_READOUT} | {name: name for name in _TRANSFORMER},
    "mult_transformer": {"spectral_clip": "spectral_clip"},
    "standard": {"transition": "transition"},
    "add_kqv": {"chain": "chain"},
    "s4nd": {"state_dim": "s4nd_d_state", "bidirectional": "s4nd_bidirectional"},
    "spatial_attn": {"num_heads": "num_heads"},
    "spatiotemporal_attn": {"num_heads": "num_heads"},
}
MODELS = {"simple": Simple, "vit": ViT, "baseline": ViT, "convnext": ConvNeXt, "shvit": SHViT}


def in_block(name: str) -> bool:
    """Whether a top-level entry of the parameters belongs to a block, that is, to what `wrap_block` wraps."""
    return name.startswith("block_")


def build(
    config: Config,
    num_classes: int,
    wrap_block: Callable | None = None,
    dtype: Any = None,
    bn_axis: str | None = None,
) -> nn.Module:
    """The model that the configuration describes.

    dtype: of activations, in place of the configuration's (float64 for an oracle).
    wrap_block: class -> class, applied to the trunk's block (simple has none); rematerialisation and the gathering of
    parameters come in here, and names of parameters do not depend on it. bn_axis: device axis over
    which batch norm takes its statistics. The module's call is `module(images, train=False)`; it draws from the rng
    stream "drop_path" when training with a drop-path rate.
    """
    dtype = dtype or (jnp.bfloat16 if config.dtype == "bf16" else jnp.float32)
    momentum = 0.9 if config.arch == "shvit" else 0.99
    common = {
        "num_classes": num_classes,
        "seq_len": config.seq_len,
        "pos_embed": config.pos_embed,
        "norm": Norm(_known(config.norm_type), dtype, bn_axis, momentum),
        "pool_type": config.pool_type,
        "dtype": dtype,
    }
    if config.arch == "shvit":
        mixer = _cell(config, dtype) if config.cell else None
        act = ACTIVATIONS[config.output_act]
        return SHViT(mixer=mixer, output_act=act, **common, **_of_blocks(config, wrap_block), **_of_stages(config))
    common |= {
        "mixer": _cell(config, dtype) if config.cell else _attention(config, dtype),
        "register_tokens": config.n_register_tokens,
        # Attention mixes the frames of a clip alike, so that no step stands for the others.
        "read_all": config.cell is None or config.frame_readout == "all",
    }
    if config.arch == "convnext":
        return ConvNeXt(
            hybrid=config.convnext_block == "hybrid",
            layer_scale_init=_known(config.layer_scale_init),
            **common,
            **_of_blocks(config, wrap_block),
            **_of_stages(config),
        )
    common |= {"embed_dim": config.embed_dim, "depth": config.depth, "stem_mode": config.stem_mode}
    if config.arch == "simple":
        act = ACTIVATIONS[config.act_type]
        return Simple(stem_layers=config.stem_layers, act=act, inter_mlp_ratio=config.inter_mlp_ratio, **common)
    return ViT(
        patch_size=config.patch_size,
        stem_stride=config.stem_stride or 1,  # patches have none
        output_act=ACTIVATIONS[config.output_act],
        use_dwconv=config.use_dwconv,
        layer_scale_init=_known(config.layer_scale_init),
        time_attn_every=config.temporal_attn_every,
        time_heads=config.num_heads or 1,
        readout_act=ACTIVATIONS[config.readout_act],
        **common,
        **_of_blocks(config, wrap_block),
    )


def _of_blocks(config: Config, wrap_block: Callable | None) -> dict[str, Any]:
    return {
        "mlp_ratio": _known(config.mlp_ratio),
        "drop_path_rate": config.drop_path_rate,
        "wrap_block": wrap_block,
    }


def _of_stages(config: Config) -> dict[str, Any]:
    return {"stages": tuple(stages(config)), "stem_stride": _known(config.stem_stride)}


def _cell(config: Config, dtype) -> Callable[..., nn.Module]:
    """(channels, name) -> the cell."""
    options = functools.partial(
        CellOptions,
        kernel_size=config.kernel_size or 1,  # cells without a kernel do not look at it
        kernel_domain=config.kernel_domain,
        kernel_origin=config.kernel_origin,
        gate_type=config.gate_type or "factored",  # likewise
        rope_mode=config.pos_embed if config.pos_embed in ROPE_MODES else "none",
        gate_time_code=config.gate_time_code,
        pre_output_act=config.pre_output_act,
        scan=cast(Method, config.scan),
        stable_transition=config.stable_transition,
        backend=cast(Backend, config.spectral_backend),
        dtype=dtype,
    )
    arguments = {name: getattr(config, knob) for name, knob in ABLATIONS.get(config.cssm, {}).items()}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if config.cssm.endswith("_attn"):
        arguments |= {"over_time": config.cssm == "spatiotemporal_attn", "layer_scale_init": 1.0}
    cell = CELLS[config.cssm]
    return lambda channels, name: cell(options(channels), name=name, **arguments)


def _attention(config: Config, dtype) -> Callable[..., nn.Module]:
    num_heads = _known(config.num_heads)
    return lambda channels, name: SelfAttention(num_heads, dtype, name=name)


def _known(value: T | None) -> T:
    """A setting that a complete configuration has wherever it applies."""
    assert value is not None
    return value
