"""Names of trunks and cells, and where among them a setting has a meaning (`applies` of a Knob)."""

ARCHS = ("simple", "vit", "baseline", "convnext", "shvit")
CELLS_NAMES = ("hgru_bi", "hgru", "gated", "gdn", "no_gate", "no_fft", "conv_ssm", "transformer", "mult_transformer")
CELLS_NAMES += ("opponent", "standard", "add_kqv", "s4nd", "spatial_attn", "spatiotemporal_attn")

CELL = {"arch": ("simple", "vit", "convnext", "shvit"), "late_mixer": ("cssm",)}
BLOCKS = {"arch": ("vit", "baseline", "convnext", "shvit")}
VIT = {"arch": ("vit", "baseline")}
# What has one width and one depth, and what has them for each stage.
UNIFORM = {"arch": ("simple", "vit", "baseline")}
STAGED = {"arch": ("convnext", "shvit")}


def cells(*names: str) -> dict[str, tuple[str, ...]]:
    """Where a setting of these cells has a meaning."""
    return {**CELL, "cssm": names}


_NO_KERNEL = ("no_fft", "conv_ssm", "s4nd", "spatial_attn", "spatiotemporal_attn")
_KERNEL = tuple(name for name in CELLS_NAMES if name not in (*_NO_KERNEL, "standard"))


def spectral(*more: str, **conditions: tuple[str, ...]) -> tuple[dict[str, tuple[str, ...]], ...]:
    """Where spectral kernels are, and in `more` cells; standard has one unless its state is carried by a decay."""
    return ({**cells(*_KERNEL, *more), **conditions}, {**cells("standard"), "transition": ("kernel",), **conditions})


GATES = cells(*(n for n in CELLS_NAMES if n not in ("no_gate", "standard", *_NO_KERNEL[1:])))
RECURRENT = cells(*(n for n in CELLS_NAMES if n not in _NO_KERNEL[2:]))
# Where a step may differ from the one before: to attention over the pixels of a frame, equal frames are one.
STEPS = cells(*(n for n in CELLS_NAMES if n != "spatial_attn"))
# Where steps pass from block to block: in shvit, those of a still image end with the cell.
PASSING = {**STEPS, "arch": ("simple", "vit", "convnext")}
ATTENTION = cells("spatial_attn", "spatiotemporal_attn")
