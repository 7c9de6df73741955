"""--target_params: the size of a model with about so many parameters.

In trunks of one width the depth follows the width, between published sizes (DEPTHS), and the width is the one that
comes nearest among those that hardware likes: multiples of 8 from 64 and of 16 from 256 on. Where none of them is
within TOLERANCE, other depths are tried, the nearest first; then the same with every width that the model allows. A
width or a depth that is given stays. In trunks with stages the depths stay, and the widths of the preset grow or shrink
together, to multiples chosen alike; where --depths has another number of stages, widths double from one to the next.
All parameters are counted as the model itself would make them (jax.eval_shape), a complex one once.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cssm import models
from cssm.config import KNOBS, Config, UserError
from cssm.data.pipeline import Outline
from cssm.recipes import preset_row
from cssm.stages import STAGED, numbers

TOLERANCE = 0.05
# (width, depth): between them the depth is interpolated. vit: 32 and below as the preset nano here; then ViT-Ti, S and
# B (Touvron et al. 2021), L and H (Dosovitskiy et al. 2021), G (Zhai et al. 2022). simple has no norm before its cells
# and was published with one: it doubles its depth when its width is four times as large.
_VIT = ((16, 1), (32, 2), (192, 12), (768, 12), (1024, 24), (1280, 32), (1664, 48))
DEPTHS = {"simple": ((32, 1), (128, 2), (512, 4), (2048, 8)), "vit": _VIT, "baseline": _VIT}
DEEPEST, WIDEST = 48, 8192
# From which width on of which number it is to be a multiple
MULTIPLES = {0: 1, 64: 8, 256: 16}
ANY = {0: 1}


@dataclass(frozen=True)
class Size:
    """settings: those that are found, with their values. volume: what parameters grow with, about."""

    settings: tuple[tuple[str, Any], ...]
    volume: float

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings)


def uniform(width: int, depth: int) -> Size:
    """Of a trunk of one width."""
    return Size((("embed_dim", width), ("depth", depth)), width * width * depth)


def staged(widths: Sequence[int], depths: Sequence[int]) -> Size:
    """Of a trunk with stages, whose depths are known."""
    volume = sum(width * width * depth for width, depth in zip(widths, depths, strict=True))
    return Size((("dims", ",".join(map(str, widths))),), volume)


def fitted(config: Config, outline: Outline) -> dict[str, Any]:
    """The settings that give the configuration the size which its target_params asks for; none where it has one.

    Raises UserError where no size, or not the one given, has that many parameters, naming the nearest.
    """
    target = config.target_params
    assert target is not None, "sizes are looked for where a number of parameters is given"
    search = _Search(config, target, outline)
    if size := _given(config):
        if not search.fits(size):
            raise UserError(
                f"--target_params {target:,}: {size} {'make' if len(size.settings) > 1 else 'makes'} "
                f"{search.count(size):,} parameters, which is not within {TOLERANCE:.0%}: leave one of them out"
            )
        return {}
    for sizes in search.ladders():
        found = search.around(sizes)
        best = min(found, key=search.distance)
        if search.fits(best):
            return dict(best.settings)
        if len(found) == 1:  # the smallest or the largest of all
            break
    raise UserError(f"--target_params {target:,}: {search.nearest()}")


def count_params(config: Config, outline: Outline) -> int:
    """Parameters of a configuration's model; a complex one counts once."""
    model = models.build(config, outline.num_classes)
    images = jnp.zeros((1, *outline.image_shape), jnp.float32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), images)["params"])
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _given(config: Config) -> Size | None:
    """The size, if nothing of it is open."""
    if config.arch in STAGED:
        return staged(numbers(config.dims) or [], numbers(config.depths or "") or []) if config.dims else None
    return uniform(config.embed_dim, config.depth) if config.embed_dim and config.depth else None


@dataclass
class _Search:
    """Sizes of one model that have been counted."""

    config: Config
    target: int
    outline: Outline
    counts: dict[Size, int] = field(default_factory=dict)

    def count(self, size: Size) -> int:
        if size not in self.counts:
            self.counts[size] = count_params(replace(self.config, **dict(size.settings)), self.outline)
        return self.counts[size]

    def distance(self, size: Size) -> float:
        return abs(self.count(size) / self.target - 1)

    def fits(self, size: Size) -> bool:
        return self.distance(size) <= TOLERANCE

    def ladders(self) -> Iterator[list[Size]]:
        """Lists of sizes that grow, in the order in which they are to be tried."""
        config = self.config
        if config.arch in STAGED:
            yield from (self._scaled(multiples) for multiples in (MULTIPLES, ANY))
            return
        least = self._least_depth()
        if config.embed_dim:
            yield [uniform(config.embed_dim, depth) for depth in range(least, DEEPEST + 1)]
            return
        points = np.array(DEPTHS[config.arch])

        def depth_of(width: int) -> int:
            usual = round(float(np.interp(width, points[:, 0], points[:, 1])))
            return config.depth or max(usual, least)

        for multiples in (MULTIPLES, ANY):
            widths = _widths(self._unit(), multiples)
            yield [uniform(width, depth_of(width)) for width in widths]
            usual: int = dict(min(self.counts, key=self.distance).settings)["depth"]
            others = range(max(least, usual // 2), 0 if config.depth else min(usual + usual // 2 + 2, DEEPEST + 1))
            for depth in sorted(others, key=lambda depth: abs(depth - usual)):
                yield [uniform(width, depth) for width in widths]

    def around(self, sizes: Sequence[Size]) -> list[Size]:
        """The last size of a ladder with fewer parameters than the target and the first with no fewer, or one of them.

        It starts where the nearest size counted so far leads, if parameters were proportional to the volume.
        """
        volumes = [size.volume for size in sizes]
        near = min(self.counts or [sizes[int(np.searchsorted(volumes[:-1], uniform(32, 2).volume))]], key=self.distance)
        start = int(np.searchsorted(volumes[:-1], near.volume * self.target / self.count(near)))
        low, high, step = start - 1, start, 1
        while low >= 0 and self.count(sizes[low]) >= self.target:
            low, high, step = max(low - step, -1), low, 2 * step
        while high < len(sizes) and self.count(sizes[high]) < self.target:
            low, high, step = high, min(high + step, len(sizes)), 2 * step
        turn = 0
        while high - low > 1:
            # In turns where a straight line on a logarithmic scale leads, and the middle.
            known = low >= 0 and high < len(sizes)
            middle = self._crossing(sizes, low, high) if known and turn % 2 == 0 else (low + high) // 2
            low, high = (middle, high) if self.count(sizes[middle]) < self.target else (low, middle)
            turn += 1
        return [sizes[i] for i in (low, high) if 0 <= i < len(sizes)]

    def _crossing(self, sizes: Sequence[Size], low: int, high: int) -> int:
        """Where between two places of a ladder the target is expected."""
        volumes = [math.log(size.volume) for size in sizes[low : high + 1]]
        ends = [math.log(self.count(sizes[low])), math.log(self.count(sizes[high]))]
        volume = float(np.interp(math.log(self.target), ends, [volumes[0], volumes[-1]]))
        return min(max(low + int(np.searchsorted(volumes, volume)), low + 1), high - 1)

    def nearest(self) -> str:
        """What there is instead of the target, in words."""
        below = max((n for n in self.counts.values() if n < self.target), default=None)
        above = min((n for n in self.counts.values() if n >= self.target), default=None)
        sizes = {n: size for size, n in self.counts.items()}
        found = [n for n in (below, above) if n is not None]
        words = [f"{n:,} ({sizes[n]})" for n in found]
        given = "depth" if self.config.depth else "embed_dim" if self.config.embed_dim else ""
        way = f", or leave --{given} out" if given else ""
        return (
            f"no size is within {TOLERANCE:.0%} of it{f' with this {given}' if given else ''}, the nearest "
            f"{'have' if len(found) > 1 else 'has'} {' and '.join(words)} parameters: "
            f"type --target_params {' or '.join(map(str, found))}{way}"
        )

    def _scaled(self, multiples: dict[int, int]) -> list[Size]:
        """The stages of the preset, as wide as 1.01 to some power makes them."""
        depths = numbers(self.config.depths or "") or []
        base = numbers(preset_row(self.config)["dims"]) or [1]
        if len(base) != len(depths):
            base = [base[0] * 2**i for i in range(len(depths))]
        widths, unit = np.array(_widths(self._unit(), multiples)), self._unit()
        smallest, largest = math.log(unit / max(base), 1.01), math.log(WIDEST / max(base), 1.01)
        scales = 1.01 ** np.arange(math.floor(smallest), largest)
        nearest = np.abs(np.log(np.outer(scales, base))[:, :, None] - np.log(widths)).argmin(-1)
        return [staged(found, depths) for found, _ in groupby(map(tuple, widths[nearest].tolist()))]

    def _least_depth(self) -> int:
        """The smallest depth that the other settings allow."""
        for depth in range(1, DEEPEST):
            try:
                replace(self.config, embed_dim=self.config.embed_dim or self._unit(), depth=depth)
            except UserError:
                continue
            return depth
        return DEEPEST

    def _unit(self) -> int:
        """Of what a width has to be a multiple."""
        divisors = (name for name in ("num_heads", "delta_key_dim") if not KNOBS[name].unmet(self.config))
        return math.lcm(2, *(getattr(self.config, name) or 1 for name in divisors))


def _widths(unit: int, multiples: dict[int, int]) -> list[int]:
    """Multiples of `unit` up to WIDEST and, from a width of `multiples` on, of its number too."""
    starts = sorted(multiples)
    widths = []
    for start, end in zip(starts, [*starts[1:], WIDEST + 1], strict=True):
        step = math.lcm(unit, multiples[start])
        widths += range(max(-(-start // step) * step, step), end, step)
    return widths
