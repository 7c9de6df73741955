"""Data sets that TFDS prepares in a moment: for tests, offline and without TensorFlow."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def encoded(pixels: np.ndarray, kind: str = "PNG") -> io.BytesIO:
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, kind)
    stream.seek(0)
    return stream


def toy(root, splits, features=None, name="toy", config=None, version="1.0.0", file_format="array_record", keys=None):
    """Prepare below root: `splits` by name, each a list of examples, dictionaries that fit `features`; of images and
    labels (by default, an Image and a ClassLabel) as `examples` makes them. Returns the folder.
    """
    import tensorflow_datasets as tfds

    kinds = features or {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(names=CLASSES)}

    class Toy(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []
        code_path = None

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(kinds), supervised_keys=keys, disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {split: enumerate(rows) for split, rows in splits.items()}

        def _generate_examples(self):
            raise AssertionError

    Toy.name = name
    tfds.disable_progress_bar()
    with redirect_stdout(io.StringIO()):
        builder = Toy(data_dir=root, file_format=file_format)
        builder.download_and_prepare(download_dir=Path(root) / "nothing")
    return Path(builder.data_dir)


def examples(images, labels, kind="PNG"):
    """One for each image: uint8 [H, W, C], or bytes as they are."""
    return [
        {"image": encoded(image, kind) if isinstance(image, np.ndarray) else io.BytesIO(image), "label": label}
        for image, label in zip(images, labels, strict=True)
    ]
