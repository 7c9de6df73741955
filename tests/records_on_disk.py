"""TFRecords and tf.train.Examples as TensorFlow writes them, for tests."""

import struct

import numpy as np

from cssm.data.crc32c import masked_crc32c


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
