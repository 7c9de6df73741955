"""The stages of a trunk: how wide and how deep each is, and on maps of which size its blocks work."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cssm.config import Config

STAGED = ("convnext", "shvit")
# How many stages of shvit, the last ones, mix with cells or attention; those before, with convolutions.
LATE = 2


@dataclass(frozen=True)
class Stage:
    """width: channels; depth: blocks; side: of its maps. mixes: a block holds a cell, or attention."""

    width: int
    depth: int
    side: int
    mixes: bool = True


def numbers(text: str) -> list[int] | None:
    """From 64,128 to [64, 128]; None if a text is not whole numbers separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else None


def stride(config: "Config") -> tuple[int, str]:
    """Pixels of the image per cell of the first map, along a side, and the setting that decides it."""
    if config.stem_mode == "pathtracker":
        return 1, "stem_mode"
    if config.stem_mode == "patch":
        return config.patch_size, "patch_size"
    if config.arch == "simple":
        return 2**config.stem_layers, "stem_layers"
    return config.stem_stride or 1, "stem_stride"


def stages(config: "Config") -> list[Stage]:
    """Of a configuration that rules.check accepts; a trunk without stages is one. Each halves the maps of the last."""
    side = -(-(config.image_size or 0) // stride(config)[0])
    if config.arch not in STAGED:
        return [Stage(config.embed_dim or 0, config.depth or 0, side)]
    depths = numbers(config.depths or "") or []
    widths = numbers(config.dims or "") or [0] * len(depths)  # open with --target_params, until they are found
    early = len(widths) - LATE if config.arch == "shvit" else 0
    return [
        Stage(width, depth, -(-side // 2**i), mixes=i >= early)
        for i, (width, depth) in enumerate(zip(widths, depths, strict=True))
    ]
