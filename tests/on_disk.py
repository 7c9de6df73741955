"""The published layouts, as they are described, and TFRecords as TensorFlow writes them: for tests."""

import gzip
import io
import json
import struct

import numpy as np
import pytest
from PIL import Image

from cssm import data
from cssm.config import Config, UserError
from cssm.data.crc32c import masked_crc32c

SPLITS = ("train", "val", "test")
N, SIDE = 40, 12
rng = np.random.default_rng(0)
STILLS = rng.integers(0, 256, (N, SIDE, SIDE, 1), np.uint8)
CLIPS = rng.integers(0, 256, (N, 5, 8, 8, 3), np.uint8)
LABELS = np.arange(N) % 2
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def normalised(pixels):
    """float32, little-endian, of three channels."""
    return ((np.broadcast_to(pixels, (*pixels.shape[:-1], 3)) / 255 - MEAN) / STD).astype("<f4")


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0]).save(stream, "PNG")
    return stream.getvalue()


def framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def encoded(**features) -> bytes:
    """An Example of lists of bytes, of whole numbers, or of arrays."""
    entries = b""
    for name, values in features.items():
        if len(values) and isinstance(values[0], bytes):
            feature = field(1, b"".join(field(1, value) for value in values))
        elif np.asarray(values).dtype.kind == "f" and len(values):
            feature = field(2, field(1, np.asarray(values, "<f4").tobytes()))
        else:
            feature = field(3, field(1, b"".join(varint(int(value)) for value in values)))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def config(dataset, root, **settings):
    return Config(dataset=dataset, data_dir=str(root), cache_dir=str(root) + "-cache", **settings)


def everything(settings):
    """(images, labels) by split."""
    sources = {split: data.load(settings, split) for split in SPLITS}
    outline = data.outline(settings)
    assert outline.examples == {split: len(source) for split, source in sources.items()}
    assert {source.image_shape for source in sources.values()} == {outline.image_shape}
    assert outline.num_classes == 2
    return {split: source.gather(np.arange(len(source))) for split, source in sources.items()}


def rows(images, labels):
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def check(found, images, labels=LABELS):
    """All examples are there, once, and each split has some."""
    assert all(len(part[1]) for part in found.values())
    parts = [np.concatenate([part[i] for part in found.values()]) for i in range(2)]
    assert parts[0].dtype == np.uint8 and parts[1].dtype == np.int32
    assert rows(*parts) == rows(images, labels)


def pathfinder_folders(root, below="curv_contour_length_14"):
    """PNG in imgs/neg and imgs/pos."""
    for i, label in enumerate(LABELS):
        put(root / below / "imgs" / ("neg", "pos")[label] / f"sample_{i:03}.png", png(STILLS[i]))


def pathfinder_metadata(root, below="curv_contour_length_14", text=False, dtype="U"):
    """PNG in imgs/BATCH with eleven columns of metadata a batch."""
    for batch in range(4):
        table = []
        for k in range(10):
            i = batch * 10 + k
            put(root / below / "imgs" / str(batch) / f"sample_{k}.png", png(STILLS[i]))
            table.append([f"imgs/{batch}", f"sample_{k}.png", k, LABELS[i], 1.8, 14, 4, 5, 2, 3, 1])
        path = root / below / "metadata" / f"{batch}.npy"
        path.parent.mkdir(exist_ok=True)
        if text:
            path.write_text("\n".join(" ".join(map(str, row)) for row in table) + "\n")
        else:
            np.save(path, np.array(table, str).astype(dtype))


def still_records(root, splits=SPLITS, form=normalised, shards=2):
    """{split}/shard_NNNNN.tfrecord of image, label, height, width, channels, and metadata.json."""
    parts = np.array_split(np.arange(N), len(splits))
    for split, part in zip(splits, parts, strict=True):
        for shard, indices in enumerate(np.array_split(part, shards)):
            content = b""
            for i in indices:
                image = form(STILLS[i])
                shape = {"height": [SIDE], "width": [SIDE], "channels": [image.shape[-1]]}
                content += framed(encoded(image=[image.tobytes()], label=[LABELS[i]], **shape))
            put(root / split / f"shard_{shard:05}.tfrecord", content)
    put(root / "metadata.json", json.dumps({"image_size": SIDE, "total_samples": N}).encode())
    return dict(zip(splits, parts, strict=True))


def clip_arrays(root):
    for number, (clip, label) in enumerate(zip(CLIPS, LABELS, strict=True)):
        path = root / str(label) / f"{label}_sample_{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, clip)


def legacy_records(root, form=normalised):
    for split, part in zip(SPLITS, np.array_split(np.arange(N), 3), strict=True):
        for shard, indices in enumerate(np.array_split(part, 2)):
            content = b""
            for i in indices:
                shape = {"num_frames": [5], "height": [8], "width": [8], "channels": [3]}
                content += framed(encoded(video=[form(CLIPS[i]).tobytes()], label=[LABELS[i]], **shape))
            put(root / split / f"shard_{shard:04}.tfrecord", content)


def flat_records(root, names="{split}-batch_0--{shard:05}-of-00002"):
    for split, part in (("train", np.arange(30)), ("test", np.arange(30, N))):
        for shard, indices in enumerate(np.array_split(part, 2)):
            content = b""
            for i in indices:
                content += framed(
                    encoded(image=[CLIPS[i].tobytes()], label=[bytes([LABELS[i]])], height=[8], width=[8])
                )
            put(root / names.format(split=split, shard=shard), gzip.compress(content))


def refusal(settings, split="train"):
    with pytest.raises(UserError) as error:
        source = data.load(settings, split)
        source.gather(np.arange(len(source)))
    assert error.value.exit_code == 2 and "\n" not in str(error.value)
    return str(error.value)
