"""CRC-32C: the published values, and the definition bit by bit."""

import numpy as np
import pytest

from cssm.data.crc32c import POLYNOMIAL, crc32c, masked_crc32c


def slow(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (POLYNOMIAL if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    "data, crc",
    [  # RFC 3720, appendix B.4, and the usual check value
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_published_values(data, crc):
    assert crc32c(data) == crc


@pytest.mark.parametrize("size", [*range(70), 127, 128, 129, *range(254, 260), 511, 512, 513, 1000, 4096, 5000])
def test_any_length_agrees_with_the_definition(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert crc32c(data) == crc32c(memoryview(data)) == slow(data)


def test_every_flipped_bit_changes_it():
    data = bytearray(range(200))
    right = crc32c(data)
    for bit in range(0, 1600, 7):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(data) != right
        data[bit // 8] ^= 1 << bit % 8


def test_the_mask_is_a_rotation_and_a_sum():
    crc = crc32c(b"123456789")
    assert masked_crc32c(b"123456789") == ((crc >> 15 | (crc & 0x7FFF) << 17) + 0xA282EAD8) % 2**32
