"""Parts of a model by the paths of its parameters: which are frozen, and how far from the head each layer is.

A path is as in checkpoints, block_0/mixer/input_proj/kernel.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import jax

from cssm.config import Config, UserError
from cssm.stages import stages

Tree = Any

_BLOCK = re.compile(r"(?:block|cell|mlp|body_norm)_(\d+)(?:_time)?")
_DOWNSAMPLE = re.compile(r"downsample(?:_norm)?_(\d+)")
_FIRST = ("stem", "stem_norm", "positions", "registers")
_LAST = ("head", "head_norm", "norm_post", "readout_norm")


def path_of(path: tuple[Any, ...]) -> str:
    """Of a leaf, from jax.tree_util's keys; a part of an array has the path of the array."""
    return "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def frozen(params: Tree, globs: str | None) -> Tree:
    """True for the leaves that stay as they are. globs: patterns of paths separated by commas, of which the last that
    fits decides; one that begins with ! leaves free what it fits. None: nothing is frozen.
    """
    patterns = _patterns(globs)

    def is_frozen(path: tuple[Any, ...], _: Any) -> bool:
        fitting = [pattern for pattern in patterns if fnmatchcase(path_of(path), pattern.removeprefix("!"))]
        return bool(fitting) and not fitting[-1].startswith("!")

    return jax.tree_util.tree_map_with_path(is_frozen, params)


def check_frozen(params: Tree, globs: str) -> str:
    """What is frozen, in a sentence. UserError for a pattern that fits nothing, and where nothing is left to train."""
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in _patterns(globs):
        if not any(fnmatchcase(path, pattern.removeprefix("!")) for path in paths):
            tops = ", ".join(dict.fromkeys(path.split("/")[0] for path in paths))
            raise UserError(
                f"--freeze {pattern}: no parameter has such a path: type for example '{paths[0].split('/')[0]}/*'; "
                f"paths begin with {tops}, --dry_run lists them all"
            )
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    kept = sum(size for size, fixed in zip(sizes, jax.tree.leaves(frozen(params, globs)), strict=True) if fixed)
    if kept == sum(sizes):
        raise UserError(f"--freeze {globs}: nothing is left to be trained: leave some free, for example with '!head/*'")
    return f"--freeze: {kept:,} of {sum(sizes):,} parameters stay as they are"


def layer_scales(params: Tree, config: Config) -> Tree:
    """What the learning rate of each leaf is multiplied with: layer_decay ** (layers from the head).

    The head and the norms around it have 1, the last block layer_decay, the stem and the positions
    layer_decay ** (blocks + 1), as in BEiT (Bao et al. 2021, appendix) and in timm.
    """
    depths = [stage.depth for stage in stages(config)]

    def scale(path: tuple[Any, ...], _: Any) -> float:
        return config.layer_decay ** (sum(depths) + 1 - layer_of(path_of(path).split("/")[0], depths))

    return jax.tree_util.tree_map_with_path(scale, params)


def layer_of(name: str, depths: Sequence[int]) -> int:
    """The layer of a top-level part: 0 the stem, 1 .. blocks the blocks, blocks + 1 the head. Between two stages the
    downsampling belongs to the block behind it. depths: blocks of each stage.
    """
    if found := _BLOCK.fullmatch(name):
        return int(found[1]) + 1
    if found := _DOWNSAMPLE.fullmatch(name):
        return [0, *accumulate(depths)][int(found[1])] + 1
    return {**dict.fromkeys(_FIRST, 0), **dict.fromkeys(_LAST, sum(depths) + 1)}[name]


def _patterns(globs: str | None) -> list[str]:
    return [pattern.strip() for pattern in (globs or "").split(",") if pattern.strip()]
