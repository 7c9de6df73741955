"""CSSM vision models, trained on every visible device. `from cssm import Config, train` is the Python entry."""

__version__ = "0.1.0"
