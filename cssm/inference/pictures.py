"""Explanations as pictures: saliency as PNG, states over time as GIF, each with the image that it is of."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageFont

TILE, GAP, LINE = 144, 6, 15  # pixels: side of a picture, between two, height of a line of text
COLUMNS = 5
MOST_FRAMES = 8  # of a clip's saliency
STEP_MS = 400
BACK, INK = "white", "black"


def save_saliency(path: Path, image: np.ndarray, saliency: np.ndarray, caption: str) -> None:
    """image uint8 [H, W, C] or [T, H, W, C], saliency [H, W] or [T, H, W]: the image, the saliency, and both; of a clip
    a row for each of up to MOST_FRAMES frames.
    """
    frames = image if image.ndim == 4 else image[None]
    maps = saliency if saliency.ndim == 3 else saliency[None]
    shown = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), MOST_FRAMES)).round().astype(int))
    heat = coloured(maps, "inferno")
    rows = []
    for t in shown:
        plain, hot = tile(frames[t]), tile(heat[t])
        rows.append([plain, hot, Image.blend(plain, hot, 0.6)])
    title = f", frames {', '.join(str(t + 1) for t in shown)}" if len(frames) > 1 else ""
    _grid(rows, ["image", "saliency", "both"], f"{caption}{title}").save(path)


def save_states(path: Path, image: np.ndarray, states: Mapping[str, np.ndarray], caption: str) -> None:
    """states: by cell [T, h, w]; a frame of the GIF for each step shows the image, and each cell's state in colours
    from the cell's lowest to its highest value at any step.
    """
    steps = max(map(len, states.values()))
    frames = image if image.ndim == 4 else image[None]
    heat = {name: coloured(values, "viridis") for name, values in states.items()}
    pages = []
    for t in range(steps):
        seen = frames[min((2 * t + 1) * len(frames) // (2 * steps), len(frames) - 1)]
        tiles = [tile(seen), *(tile(values[min(t, len(values) - 1)]) for values in heat.values())]
        names = ["image", *heat]
        rows = [tiles[i : i + COLUMNS] for i in range(0, len(tiles), COLUMNS)]
        pages.append(_grid(rows, names, f"{caption}, step {t + 1} of {steps}"))
    first, *rest = pages
    first.save(path, save_all=True, append_images=rest, duration=STEP_MS, loop=0)


def coloured(values: np.ndarray, name: str) -> np.ndarray:
    """[..., h, w] -> uint8 [..., h, w, 3], from the lowest value to the highest; what is not finite is grey."""
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
    scaled = (np.where(finite, values, low) - low) / (high - low) if high > low else np.zeros(values.shape)
    colours = np.rint(255 * colormaps[name](scaled)[..., :3]).astype(np.uint8)
    return np.where(finite[..., None], colours, np.uint8(128))


def tile(pixels: np.ndarray) -> Image.Image:
    """uint8 [h, w, C] -> TILE x TILE in colours; small ones keep their pixels visible. Other than 3 channels: the
    first, in grey.
    """
    picture = Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0]).convert("RGB")
    larger = max(picture.size) > TILE
    return picture.resize((TILE, TILE), Image.Resampling.BILINEAR if larger else Image.Resampling.NEAREST)


def _grid(rows: Sequence[Sequence[Image.Image]], names: Sequence[str], caption: str) -> Image.Image:
    """Tiles in rows with their names above, which those of a row below share unless there are more, and a caption."""
    font = ImageFont.load_default(size=11)
    named = math.ceil(len(names) / COLUMNS)
    columns = max(map(len, rows))
    wide = max(columns * (TILE + GAP) + GAP, 3 * TILE)
    heights = [LINE * (i < named) + TILE + GAP for i in range(len(rows))]
    page = Image.new("RGB", (wide, 2 * GAP + LINE + sum(heights)), BACK)
    draw = ImageDraw.Draw(page)
    draw.text((GAP, GAP), _fitting(draw, caption, wide - 2 * GAP, font), INK, font)
    top = 2 * GAP + LINE
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            left = GAP + j * (TILE + GAP)
            if i < named:
                draw.text((left, top), _fitting(draw, names[i * COLUMNS + j], TILE, font), INK, font)
            page.paste(picture, (left, top + LINE * (i < named)))
        top += heights[i]
    return page


def _fitting(draw: ImageDraw.ImageDraw, text: str, width: int, font: Any) -> str:
    """The text on one line, its beginning left out where it is too long."""
    text = " ".join(text.split())
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength(f"...{text}", font) > width:
        text = text[1:]
    return f"...{text}"
