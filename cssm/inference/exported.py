"""The exported folder of a model: written, and read back bit for bit. It can be handed to others: no path, no name of a
machine or a person is in it, and reading it runs no program.

    model.safetensors   the parameters, "params/block_0/mixer/kernel", and running statistics, "batch_stats/...". A
                        complex array [...] is stored as float32 [..., 2], its real and imaginary parts, and is named
                        in the file's metadata: complex = JSON list
    config.yaml         the settings it was trained with
    model.json          classes, shape of the images, step; sha256 of each of the other two
    README.md           what it is and how to use it
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from cssm.checkpoint.step_folder import by_path
from cssm.config import UserError, read_yaml, write_yaml

TENSORS, SETTINGS, FACTS, CARD = "model.safetensors", "config.yaml", "model.json", "README.md"
SCHEMA, STORAGE = 1, 6
COMPLEX = "complex"
# What model.json must hold besides what it tells for people, and of which type.
_FORMS = {"image_shape": list, "num_classes": int, "classes": list, "step": int, "averaged": bool, "best": dict}
_FORMS |= {"from_files": bool}


@dataclass(frozen=True)
class Found:
    """What a folder holds. settings: of config.yaml; facts: of model.json."""

    variables: dict[str, Any]
    settings: dict[str, Any]
    facts: dict[str, Any]


def write_folder(
    folder: Path, variables: Mapping[str, Any], settings: Mapping[str, Any], facts: Mapping[str, Any], card: str
) -> None:
    """Write the four files into a folder that is there."""
    write_tensors(folder / TENSORS, by_path(variables))
    write_yaml(folder / SETTINGS, settings)
    digests = {name: _sha256(folder / name) for name in (TENSORS, SETTINGS)}
    text = json.dumps({"schema": SCHEMA, **facts, "sha256": digests}, indent=2, ensure_ascii=False)
    (folder / FACTS).write_text(text + "\n", encoding="utf-8")
    (folder / CARD).write_text(card, encoding="utf-8")


def read_folder(folder: Path) -> Found:
    """What `write_folder` wrote. UserError, with exit code 6, where a file is missing, changed, or of another form."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
            raise ValueError(f"{FACTS} is of another version of this program")
        if wrong := [name for name, form in _FORMS.items() if type(facts.get(name)) is not form]:
            raise ValueError(f"{FACTS} has no {wrong[0]}")
        if not all(type(side) is int and side > 0 for side in facts["image_shape"]):
            raise ValueError(f"{FACTS} has no image_shape")
        for name in (TENSORS, SETTINGS):
            if _sha256(folder / name) != dict(facts.get("sha256", {})).get(name):
                raise ValueError(f"{name} is not what was exported")
        leaves = read_tensors(folder / TENSORS)
    except (OSError, ValueError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"--checkpoint {folder}: the exported model cannot be read: {why}", STORAGE) from error
    return Found({"batch_stats": {}, **nested(leaves)}, read_yaml(folder / SETTINGS), facts)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of leaves by path: the inverse of by_path for dictionaries."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, name = path.split("/")
        place = tree
        for key in above:
            place = place.setdefault(key, {})
        place[name] = leaf
    return tree


def write_tensors(path: Path, leaves: Mapping[str, np.ndarray]) -> None:
    """Arrays by name to a .safetensors file; complex ones in the layout above."""
    stored, complex_names = {}, []
    for name, leaf in leaves.items():
        leaf = np.ascontiguousarray(leaf).reshape(np.shape(leaf))  # the first makes a scalar an array [1]
        if leaf.dtype == np.complex64:
            complex_names.append(name)
            leaf = leaf.reshape(*leaf.shape, 1).view(np.float32)
        stored[name] = leaf
    safetensors.numpy.save_file(stored, path, metadata={COMPLEX: json.dumps(complex_names)})


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The inverse of `write_tensors`, bit for bit. ValueError or SafetensorError for another file."""
    with safetensors.safe_open(path, framework="numpy") as file:
        complex_names = json.loads((file.metadata() or {}).get(COMPLEX, "[]"))
        leaves = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    for name in complex_names:
        leaf = leaves.get(name)
        if leaf is None or leaf.dtype != np.float32 or leaf.shape[-1:] != (2,):
            raise ValueError(f"{name} is not stored as real and imaginary parts")
        leaves[name] = np.ascontiguousarray(leaf).view(np.complex64)[..., 0]
    return leaves


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
