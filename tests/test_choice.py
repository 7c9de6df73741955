"""Choosing devices by index or by number, the same for names of GPUs as for devices."""

import pytest

from parallel.choice import DeviceError, count, narrowed

VISIBLE = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "gpus,num_devices,chosen",
    [
        (None, None, "abcd"),
        ("2,0", None, "ca"),
        ([3], None, "d"),
        (" 1 , 2", None, "bc"),
        (None, 3, "abc"),
        ("1,3", 2, "bd"),
    ],
)
def test_a_choice_keeps_its_order(gpus, num_devices, chosen):
    assert narrowed(VISIBLE, gpus, num_devices) == list(chosen)


@pytest.mark.parametrize(
    "gpus,num_devices,sentence",
    [
        ("0,9", None, "--gpus 0,9: there is no device 9, the visible devices are 0 to 3"),
        ("1,1", None, "--gpus 1,1: a device is named twice"),
        ("0,x", None, "--gpus 0,x: not a list of device indices"),
        ("", None, "--gpus : not a list of device indices"),
        (None, 5, "--num_devices 5: 4 devices visible, type 1 to 4"),
        (None, 0, "--num_devices 0: 4 devices visible, type 1 to 4"),
        ("0,1", 3, "--num_devices 3 contradicts the 2 of --gpus"),
    ],
)
def test_a_choice_that_cannot_be_met_names_what_exists(gpus, num_devices, sentence):
    with pytest.raises(DeviceError, match=r"^[^\n]*$") as raised:
        narrowed(VISIBLE, gpus, num_devices)
    assert str(raised.value).startswith(sentence)


def test_numbers_in_words():
    assert (count(1), count(2)) == ("1 device", "2 devices")
