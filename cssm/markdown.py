"""Tables in Markdown that read well as they are."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The first row is the head. The first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    rule = (f"{'-' * (width + 2)}" if i < left else f"{'-' * (width + 1)}:" for i, width in enumerate(widths))
    return "\n".join([line(rows[0]), f"|{'|'.join(rule)}|", *map(line, rows[1:])])
