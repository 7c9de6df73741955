"""Where predictions go: a file of JSON lines or CSV, or the screen."""

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from cssm.config import UserError
from cssm.report import Reporter
from cssm.report.replaced import check_folder, check_replaced

# Endings, and how files of predictions begin.
BEGINNINGS = {".jsonl": '{"input": "', ".csv": "input,class_1,probability_1"}
Prediction = Mapping[str, Any]


def check_output(output: str | None, explain: str | None = None) -> Path | None:
    """The file that --output names. UserError for a kind that is not written, a folder, or a file that is there and
    holds no predictions, and where --explain names what holds something, or is no folder.
    """
    if explain is not None:
        check_folder("--explain", Path(explain))
    if output is None:
        return None
    path = Path(output)
    if path.suffix not in BEGINNINGS:
        raise UserError(
            f"--output {path}: predictions are written as {' or '.join(BEGINNINGS)}, type one of these endings"
        )
    if path.is_dir():
        raise UserError(f"--output {path} is a folder: type the name of a file in it")
    check_replaced(path, BEGINNINGS[path.suffix])
    return path


class Predictions:
    """Writes one prediction after another: {input, class, label, probability, top: [{class, label, probability}, ...]}.

    A file gets its name once it is complete; until then, and for good where the program is stopped, it is called
    NAME.partial. Without a file they are told: a line each, or an event of --headless.
    """

    def __init__(self, path: Path | None, top_k: int, report: Reporter) -> None:
        self.path, self._top_k, self._report = path, top_k, report
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("w", newline="", encoding="utf-8", errors="surrogateescape")
            if self.path.suffix == ".csv":
                ranks = range(1, self._top_k + 1)
                csv.writer(self._file).writerow(
                    ["input", *(f"{name}_{rank}" for rank in ranks for name in ("class", "probability"))]
                )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is None or self.path is None:
            return
        self._file.close()
        if kind is None:
            os.replace(self._partial, self.path)
        else:
            self._report.line(f"note: what was predicted so far is in {self._partial}")

    def write(self, row: Prediction) -> None:
        """One more."""
        if self._file is None:
            self._report.event("prediction", **row)
            told = ", ".join(f"{guess['class']} {guess['probability']:.4f}" for guess in row["top"])
            self._report.line(f"{row['input']}: {told}")
        elif self.path is not None and self.path.suffix == ".csv":
            cells = [value for guess in row["top"] for value in (guess["class"], guess["probability"])]
            csv.writer(self._file).writerow([row["input"], *cells])
        else:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    @property
    def _partial(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.partial")
