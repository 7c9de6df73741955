"""A page of HTML that needs nothing but itself: no script, no address, light or dark as its reader has it.

Whatever text comes from outside passes through `escape`, here and nowhere else; what is markup already is a `Markup`.
"""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --faint: #59636e; --line: #d5dae0; --ground: #fff; --raised: #f5f7f9;
  --good: #1a7f37; --bad: #c62828; --heat: 68, 119, 170; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --faint: #9aa5b1; --line: #363d45; --ground: #14181c;
  --raised: #1e2329; --good: #5dc878; --bad: #ff8a80; --heat: 110, 165, 220; --train: #7fb0e0; --val: #ff8a65;
  --test: #6fcf8e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--ink); background: var(--ground);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; } h3 { font-size: 1rem; }
p { margin: .5rem 0; }
.faint, figcaption { color: var(--faint); font-size: .875rem; }
.wide { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; }
table.pairs td { text-align: left; overflow-wrap: anywhere; } table.pairs th { text-align: left; white-space: nowrap; }
table.matrix td { text-align: center; border: 1px solid var(--line); min-width: 2.2rem; }
.tiles { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); }
.tile { background: var(--raised); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.25rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; } .charts svg { width: 100%; height: auto; } .charts svg text { fill: currentColor; }
.samples { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); }
.samples img { width: 100%; image-rendering: pixelated; border-radius: .25rem; display: block; }
.good { color: var(--good); } .bad { color: var(--bad); } .matrix-picture { width: min(100%, 30rem); background: #fff; }
summary { cursor: pointer; font-weight: 600; }
"""
# Nothing may be loaded, whatever the page should come to hold.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Markup(str):
    """HTML that is finished; every other text is taken as it reads."""


def escape(value: Any) -> Markup:
    """As HTML that reads as the value's text."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def element(name: str, *inside: Any, **attributes: str) -> Markup:
    """<name ...>inside</name>; an attribute `class_` is written without its underscore."""
    written = "".join(f' {key.rstrip("_")}="{html.escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(map(escape, inside))}</{name}>")


def document(title: str, *sections: Markup) -> str:
    """The whole page, with the title as its heading."""
    head = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
{element("title", title)}
<style>{_STYLE}</style>
</head>
"""
    return head + element("body", element("h1", title), *sections) + "\n</html>\n"


def section(title: str, *inside: Any) -> Markup:
    """A part of the page under a heading."""
    return element("section", element("h2", title), *inside)


def folded(title: str, *inside: Any) -> Markup:
    """A part that is opened by a click."""
    return element("details", element("summary", title), *inside)


def tiles(values: Iterable[tuple[str, str]]) -> Markup:
    """(label, figure) each in a box."""
    return element(
        "div", *(element("div", label, element("b", value), class_="tile") for label, value in values), class_="tiles"
    )


def pairs(values: Mapping[str, Any]) -> Markup:
    """Names and what they are set to."""
    rows = (element("tr", element("th", name), element("td", value)) for name, value in values.items())
    return element("div", element("table", *rows, class_="pairs"), class_="wide")


def table(rows: Sequence[Sequence[Any]]) -> Markup:
    """The first row is the head."""
    head, *others = rows
    lines = [element("tr", *(element("td", cell) for cell in row)) for row in others]
    return element(
        "div", element("table", element("tr", *(element("th", cell) for cell in head)), *lines), class_="wide"
    )


def charts(pictures: Mapping[str, str]) -> Markup:
    """SVG by what it shows, side by side where there is room."""
    figures = (element("figure", Markup(svg), element("figcaption", label)) for label, svg in pictures.items())
    return element("div", *figures, class_="charts")


def png(pixels: np.ndarray, side: int | None = None) -> bytes:
    """uint8 [H, W, C] as a PNG; of 1 or 2 channels the first is shown, of more the first three; no side longer
    than `side`.
    """
    shown = pixels[..., 0] if pixels.shape[-1] < 3 else pixels[..., :3]
    image = Image.fromarray(np.ascontiguousarray(shown))
    if side:
        image.thumbnail((side, side))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def picture(image: bytes, alt: str, **attributes: str) -> Markup:
    """A PNG within the page."""
    source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return Markup(element("img", src=source, alt=alt, **attributes).removesuffix("</img>"))
