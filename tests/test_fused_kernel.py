"""What a program of the kernel reads and writes: gates of every shape, what is read of the states, real numbers."""

import pytest
from test_fused import B, F, gates, numbers, packed, same, spectra

from cssm.cells import gated, opponent
from cssm.spectral import Spectrum, add, multiply, scale


@pytest.mark.parametrize("shape", [(B, 3, F, 4), (B, 3, 1, 1), (1, 3, F, 1)])
def test_gates_of_every_shape(shape):
    same(gated._step, spectra(F, 4), (1, 1), gates(("decay", "write"), *shape), packed(B, 3, F, 4))


@pytest.mark.parametrize("last_only,shape", [(False, (B, 3, F, 4)), (True, (B, 3, F, 1)), (True, (B, 1, 1, 4))])
def test_what_is_read_and_the_gates_of_reading(last_only, shape):
    """Fewer spectra than there are states, one of them read twice, and one a product of three."""

    def read(h, g):
        return add(scale(g["a"], h[0]), h[1]), multiply(g["z"], scale(g["a"], h[1]))

    reading = gates("a", *shape) | {"z": spectra(B, shape[1], F, 4)[0]}
    args = opponent._step, spectra(F, 4, count=2), (2, 1), gates(opponent.GATES, B, 3, F, 1), packed(B, 3, F, 4)
    same(*args, last_only=last_only, read=read, read_gates=reading)


@pytest.mark.parametrize("last_only", [False, True])
def test_real_numbers_have_one_plane(last_only):
    make_step = lambda k: lambda h, g, u: (Spectrum(k * g["a"] * h[0].re + u[0].re, h[0].im),)
    args = make_step, (numbers(4),), (1, 1), gates("a", 1, 3, 1, 1), numbers(B, 3, 1, F, 4)
    same(*args, last_only=last_only)
