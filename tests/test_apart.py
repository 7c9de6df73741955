"""Calls in other processes: their answers, their errors, and what is said where neither comes."""

import os

import pytest

from cssm.apart import apart, ranks
from cssm.config import UserError


def refuse():
    raise UserError("it is so", 6)


def multiplied(rank, factor):
    return os.getpid(), rank * factor


def die():
    os._exit(9)


@pytest.mark.slow
def test_answers_and_errors_come_back_and_a_process_that_is_killed_is_told():
    assert apart(os.getpid) != os.getpid()
    with pytest.raises(UserError, match="it is so") as refused:
        apart(refuse)
    assert refused.value.exit_code == 6
    pids, products = zip(*ranks(multiplied, 3, 10), strict=True)
    assert len(set(pids)) == 3 and products == (0, 10, 20)
    with pytest.raises(UserError, match="ended without an answer") as refused:
        apart(die)
    assert refused.value.exit_code == 4
