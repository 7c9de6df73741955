"""TFRecords: what is written byte by byte is read back; what is damaged says where."""

import gzip
import struct

import numpy as np
import pytest
from on_disk import encoded, framed

from cssm.config import UserError
from cssm.data.tfrecord import example, read, records

DATA = [b"", b"a", bytes(range(256)) * 40, b"xyz" * 33333]


def write(path, data=DATA, compressed=False):
    content = b"".join(map(framed, data))
    path.write_bytes(gzip.compress(content) if compressed else content)
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_records_are_read_back_in_any_order(tmp_path, compressed):
    path = write(tmp_path / "a", compressed=compressed)
    found = records(path, tmp_path / "cache")
    assert [read(record) for record in found[::-1]] == DATA[::-1]
    assert [str(record) for record in found] == [f"record {i} of {path}" for i in range(len(DATA))]
    assert (tmp_path / "cache").exists() == compressed


def test_a_compressed_file_can_be_read_without_writing(tmp_path):
    assert [read(record) for record in records(write(tmp_path / "a", compressed=True), None)] == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_compressed_file_is_unpacked_once_and_again_when_it_changed(tmp_path):
    path, cache = write(tmp_path / "a", compressed=True), tmp_path / "cache"
    records(path, cache)
    records(path, cache)
    assert len(list(cache.iterdir())) == 1
    write(path, DATA[::-1], compressed=True)
    assert [read(record) for record in records(path, cache)] == DATA[::-1]
    assert len(list(cache.iterdir())) == 2
    with pytest.raises(UserError, match=r"cannot be unpacked into .*--cache_dir") as error:
        records(path, path / "below")
    assert error.value.exit_code == 6


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("cut", [0, 5, 15, 40, -3])
def test_a_file_that_ends_early_keeps_what_is_whole(tmp_path, compressed, cut):
    content = b"".join(map(framed, DATA))[:cut] if cut else b""
    (tmp_path / "a").write_bytes(gzip.compress(content) if compressed else content)
    found = records(tmp_path / "a", tmp_path / "cache")
    whole = sum(sum(16 + len(data) for data in DATA[: i + 1]) <= len(content) for i in range(len(DATA)))
    assert [read(record) for record in found[:whole]] == DATA[:whole]
    with pytest.raises(ValueError, match="the file ends within it" if cut else "the file is empty"):
        read(found[whole])
    assert len(found) == whole + 1


def test_a_truncated_gzip_keeps_what_is_whole(tmp_path):
    data = [np.random.default_rng(i).bytes(50_000) for i in range(6)]
    content = gzip.compress(b"".join(map(framed, data)))
    (tmp_path / "a").write_bytes(content[: len(content) // 2])
    for folder in (None, tmp_path / "cache"):
        found = records(tmp_path / "a", folder)
        assert 1 < len(found) < 6 and found[-1].flaw == "the file ends within it"
    assert [read(record) for record in found[:-1]] == data[: len(found) - 1]


def test_a_wrong_crc_is_told(tmp_path):
    content = bytearray(write(tmp_path / "a").read_bytes())
    content[16 + 12] ^= 1  # the data of the second record
    (tmp_path / "a").write_bytes(content)
    found = records(tmp_path / "a", None)
    with pytest.raises(ValueError, match="its CRC is wrong"):
        read(found[1])
    assert read(found[2]) == DATA[2]
    content[16] ^= 1  # its length
    (tmp_path / "b").write_bytes(content)
    found = records(tmp_path / "b", None)
    assert len(found) == 2 and "length has a wrong CRC" in found[1].flaw


def test_examples_are_read_back():
    numbers = [0, 1, -1, 127, 128, 300, 2**63 - 1, -(2**63)]
    found = example(
        encoded(image=[b"\x00\xff" * 500, b""], label=[7], many=np.array(numbers), some=np.float32([1.5, -2]), none=[])
    )
    assert found["image"] == [b"\x00\xff" * 500, b""] and found["label"].tolist() == [7]
    assert found["many"].dtype == np.int64 and found["many"].tolist() == numbers
    assert found["some"].dtype == np.float32 and found["some"].tolist() == [1.5, -2]
    assert len(found["none"]) == 0 and example(b"") == {}


def test_numbers_that_are_not_packed_are_read_too():
    """Encoders may repeat the field instead."""
    value = b"\x08\x05\x08\x06"  # two fields 1
    feature = b"\x1a" + bytes([len(value)]) + value
    pair = b"\x0a\x01n" + b"\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(pair)]) + pair
    assert example(b"\x0a" + bytes([len(features)]) + features)["n"].tolist() == [5, 6]


@pytest.mark.parametrize(
    "data", [b"\x0a\xff", b"\x0a\x05abc", b"\xff" * 20, b"\x0f", b"\x08\x01", struct.pack("<Q", 3)]
)
def test_what_is_no_example_is_refused(data):
    with pytest.raises(ValueError, match=r"no tf.train.Example"):
        example(data)
