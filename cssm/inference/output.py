"""Files that inference leaves: folders that replace only what they made before, names that stay where they belong."""

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cssm.config import UserError
from cssm.report.events import jsonable

LONGEST = 60  # letters of an input's name that its pictures keep


def make_folder(path: str | Path, replaces: Collection[str]) -> Path:
    """The folder, made where it is missing. UserError where it is a file, or holds others than the names that are about
    to be written: nothing of anyone's is overwritten.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file, and a folder is wanted: type another")
    folder.mkdir(parents=True, exist_ok=True)
    if others := sorted(entry.name for entry in folder.iterdir() if entry.name not in replaces):
        raise UserError(f"--output {folder} holds {others[0]}, which is not of this program: type another folder")
    return folder


def put_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object, a line for each of its entries, under a temporary name; then rename."""
    partial = path.with_name(f"{path.name}.partial")
    lines = [f" {json.dumps(key)}: {json.dumps(item, allow_nan=False)}" for key, item in jsonable(value).items()]
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(partial, path)


def file_name(number: int, total: int, name: str) -> str:
    """A name for the pictures of input `number` of `total`: in letters, digits, dots, dashes; it names no folder."""
    stem = re.sub(r"[^\w.-]+", "_", Path(name).name, flags=re.ASCII).strip("._") or "input"
    return f"{number:0{len(str(total - 1))}}_{stem[:LONGEST]}"
