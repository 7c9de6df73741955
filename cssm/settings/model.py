"""Settings of the trunk."""

import dataclasses
from functools import partial

from cssm import recipes
from cssm.knobs import TRAINING, knob
from cssm.settings.family import (
    ARCHS,
    ATTENTION,
    BLOCKS,
    CELL,
    CELLS_NAMES,
    PASSING,
    STAGED,
    STEPS,
    UNIFORM,
    VIT,
)

_POSITIONS = ("none", "learnable", "sinusoidal", "temporal", "spatial_only", "spatiotemporal")
_POSITIONS += ("spatiotemporal_legacy", "mrope", "separate")

_model = partial(knob, group="model", resume="fixed", verbs=TRAINING)


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The trunk: what images become, and what blocks there are."""

    # fmt: off
    arch: str = _model("simple", "the trunk", choices=ARCHS)
    cssm: str = _model("hgru_bi", "the cell, which mixes space and time", choices=CELLS_NAMES, applies=CELL)
    convnext_block: str = _model("pure", "the cell in the place of a block's convolution, or behind it",
        choices=("pure", "hybrid"), applies={"arch": ("convnext",)})
    late_mixer: str = _model("cssm", "what mixes in the last two stages: cells, or attention with one head",
        choices=("cssm", "attention"), applies={"arch": ("shvit",)})
    preset: str = _model("nano", "the size; vit and baseline: tiny, small and base have 12 blocks of 192, 384 and 768 "
        "channels; convnext: nano, tiny; shvit: nano, s1 to s4", choices=recipes.SIZES, applies=BLOCKS)
    embed_dim: int | None = _model(None, "channels, an even number", bounds="[2,)", multiple_of=2, applies=UNIFORM)
    depth: int | None = _model(None, "number of blocks", bounds="[1,)", applies=UNIFORM)
    dims: str | None = _model(None, "channels of each stage, such as 64,128,256", applies=STAGED)
    depths: str | None = _model(None, "blocks of each stage, such as 1,2,1", applies=STAGED)
    target_params: int | None = _model(None, "find a size with so many parameters, to 5%: embed_dim and depth, of "
        "which one may be given, or dims", bounds="[1,)", unset="sizes by recipe")
    mlp_ratio: float | None = _model(None, "width of a block's MLP over its channels", bounds="(0,)",
        applies=BLOCKS)
    num_heads: int | None = _model(None, "attention heads, a divisor of the channels", bounds="[1,)",
        applies=({"arch": ("baseline",)}, ATTENTION))
    stem_mode: str = _model("conv", "how images become maps; pathtracker keeps the resolution (simple only), "
        "patch is for vit and baseline", choices=("conv", "patch", "pathtracker"), applies=UNIFORM)
    patch_size: int = _model(16, "side of a patch, a divisor of image_size", bounds="[1,)",
        applies={"stem_mode": ("patch",)})
    stem_stride: int | None = _model(None, "stride of the stem's convolution; of both together in shvit: 1, 2 or 4",
        bounds="[1,)", applies={**BLOCKS, "stem_mode": ("conv",)})
    stem_layers: int = _model(1, "layers of the stem, each halves the resolution", bounds="[1,)",
        applies={"arch": ("simple",), "stem_mode": ("conv",)})
    seq_len: int | None = _model(None, "time steps, for which a still image is repeated and the frames of a clip are "
        "sampled evenly", bounds="[1,)", applies=STEPS)
    n_register_tokens: int = _model(0, "learned frames before the first step", bounds="[0,)", applies=PASSING)
    frame_readout: str = _model("last", "steps that are read", choices=("last", "all"), applies=PASSING)
    pos_embed: str | None = _model(None, "positions; baseline takes none or learnable", choices=_POSITIONS,
        aliases=("rope_mode",), unset="by recipe")
    norm_type: str | None = _model(None, "normalisation of maps: over channels, the batch, each channel's map, "
        "or all of an example", choices=("layer", "batch", "instance", "global_layer"))
    act_type: str = _model("softplus", "activation of the stem, between cells and before pooling",
        choices=("softplus", "gelu", "relu"), applies={"arch": ("simple",)})
    inter_mlp_ratio: float = _model(0.0, "width over embed_dim of an MLP between cells, 0 for none", bounds="[0,)",
        applies={"arch": ("simple",)})
    output_act: str = _model("none", "activation of what a block's cell returns", choices=("none", "gelu", "silu"),
        applies={**CELL, "arch": ("vit", "shvit")})
    use_dwconv: bool = _model(False, "a depthwise 3x3 convolution in each MLP", applies=VIT)
    temporal_attn_every: int = _model(0, "blocks between those with attention over time, 0 for none",
        bounds="[0,)", applies={"arch": ("baseline",)})
    readout_act: str = _model("gelu", "activation before the classifier", choices=("gelu", "none", "silu", "softplus"),
        applies=VIT)
    pool_type: str = _model("max", "pooling over space at the end", choices=("mean", "max", "logsumexp"),
        aliases=("pooling_mode",))
    drop_path_rate: float = _model(0.0, "highest rate at which a block is skipped in training",
        bounds="[0,1)", applies=BLOCKS)
    layer_scale_init: float | None = _model(None, "first value of the factor on each branch", bounds="(0,)",
        applies={"arch": ("vit", "baseline", "convnext")})
    # fmt: on
