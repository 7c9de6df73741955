"""What inference writes replaces its own files alone, and stays where it belongs."""

import json
from pathlib import Path

import pytest

from cssm.config import UserError
from cssm.inference.output import file_name, make_folder, put_json


def test_a_folder_is_made_and_its_own_files_may_be_replaced(tmp_path):
    folder = make_folder(tmp_path / "a" / "b", {"x.json"})
    put_json(folder / "x.json", {"a": 1})
    assert make_folder(folder, {"x.json"}) == folder


def test_the_files_of_others_are_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"holds thesis\.tex"):
        make_folder(tmp_path, {"x.json"})
    with pytest.raises(UserError, match="is a file"):
        make_folder(tmp_path / "thesis.tex", {})


def test_json_is_plain_and_complete(tmp_path):
    put_json(tmp_path / "x.json", {"a": float("nan"), "b": [[1, 2], [3, 4]], "c": "é"})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == {"a": "nan", "b": [[1, 2], [3, 4]], "c": "é"} and len(text.splitlines()) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "..", ".", "", "a\0b", "C:\\x", "x" * 500, "-rf", "Ä ö.png"]
)
def test_a_picture_stays_in_its_folder(name):
    made = file_name(3, 100, name)
    assert Path(made).name == made and made.startswith("03_") and len(made) < 100
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


def test_pictures_sort_as_the_inputs_do():
    names = [file_name(i, 1000, "a") for i in (0, 9, 10, 999)]
    assert names == sorted(names) and len(set(names)) == 4
