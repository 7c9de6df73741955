"""CSSM vision models, trained on every visible device. In Python: `from cssm import Config, train, load_trained`."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {"Config": "cssm.config", "train": "cssm.training", "load_trained": "cssm.inference.weights"}


def __getattr__(name: str) -> Any:
    """Load the public names when they are first asked for, so that `--help` imports no jax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
