"""CSSM vision models, trained on every visible device. In Python: `from cssm import Config, train`."""

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"


class _Train(ModuleType):
    """cssm/train.py is a module, and `cssm.train(config)` trains: calling the module calls its function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.train(*args, **kwargs)


class _Package(ModuleType):
    """Python binds a submodule to its package when it is first imported, however that comes about."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train":
            value.__class__ = _Train
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Load the public names when they are first asked for, so that `--help` imports no jax."""
    if name == "Config":
        return importlib.import_module("cssm.config").Config
    if name == "train":
        return importlib.import_module("cssm.train")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
