"""Data sets of TensorFlow Datasets, downloaded and prepared as array_record. Most of them need TensorFlow for it."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from cssm.config import Config, UserError, did_you_mean
from cssm.data.examples import reason
from cssm.data.prepared import examples_of, import_tfds, parts
from cssm.data.records import no_room
from cssm.data.written import prepare

MOST_WORDS = 400  # characters that TFDS may say about a failure


def download(config: Config) -> tuple[Path, dict[str, int], bool]:
    """Prepare config.dataset, tfds:NAME[/CONFIG][:VERSION], below config.data_dir: its folder, its examples by split,
    and whether it was there already. UserError for what TFDS does not know, cannot get, or has no images and classes;
    OSError from the disk.
    """
    name, variant, version = parts(config.dataset)
    assert config.data_dir is not None, "rules.check wants one"
    tfds = import_tfds()
    full = name + (f"/{variant}" if variant else "") + (f":{version}" if version else "")
    try:
        with redirect_stdout(io.StringIO()):  # where it tells at length that TensorFlow is missing
            builder = tfds.builder(full, data_dir=Path(config.data_dir).absolute(), file_format="array_record")
        examples_of(tfds, config.dataset, builder.info)
        folder = Path(builder.data_dir)
        there = (folder / "dataset_info.json").is_file()
        if not there:
            prepare(tfds, builder)
    except tfds.core.DatasetNotFoundError:
        raise _unknown(tfds, config.dataset, name) from None
    except ImportError as error:
        found = re.search(r"No module named '(\w+)", str(error))
        if found is None:
            raise
        raise UserError(
            f"preparing {config.dataset} needs {_PROPER.get(found[1], found[1])}, which is not installed: type "
            f"pip install 'cssm[prepare]'" + ("" if found[1] in _PROPER else f" {found[1]}")
        ) from None
    except (ValueError, AssertionError, OSError) as error:
        if isinstance(error, OSError) and no_room(error):
            raise
        raise UserError(f"{config.dataset} cannot be prepared: {reason(error)[:MOST_WORDS]}") from error
    return folder, {split: info.num_examples for split, info in builder.info.splits.items()}, there


# What the extra holds, by the name under which it is imported
_PROPER = {"tensorflow": "TensorFlow", "importlib_resources": "importlib-resources"}


def _unknown(tfds: Any, dataset: str, name: str) -> UserError:
    near = did_you_mean(name, tfds.list_builders(with_community_datasets=False), "tfds:")
    return UserError(
        f"{dataset}: this TFDS has no {name} (data sets of videos it knows only where TensorFlow is installed, by "
        f"pip install 'cssm[prepare]'){near or ': its catalogue lists what it has'}"
    )
