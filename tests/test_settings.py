"""The declarations of settings: each once, and each condition one that can hold."""

import dataclasses
from itertools import groupby

import pytest

from cssm import settings
from cssm.config import ARCHS, CELLS_NAMES, KNOBS
from cssm.knobs import VERBS

TOPICS = [getattr(settings, name) for name in settings.__all__]


def test_names_are_those_of_the_cells_and_trunks():
    from cssm.cells import CELLS
    from cssm.models import MODELS

    assert set(CELLS_NAMES) == set(CELLS)
    assert set(ARCHS) == set(MODELS)


def test_every_setting_is_declared_once_and_groups_stay_together():
    names = [field.name for topic in TOPICS for field in dataclasses.fields(topic)]
    assert sorted(names) == sorted(KNOBS)
    groups = [group for group, _ in groupby(knob.group for knob in KNOBS.values())]
    assert len(groups) == len(set(groups))


@pytest.mark.parametrize("name", KNOBS)
def test_what_a_setting_depends_on_exists(name):
    knob = KNOBS[name]
    assert set(knob.verbs) <= set(VERBS)
    for way in knob.applies:
        for cause, values in way.items():
            choices = KNOBS[cause].choices or (True, False)
            assert values and set(values) <= set(choices), f"{name} depends on --{cause} {values}"
