"""Data sets that TFDS would download: what it does not know, or lacks, is told in one sentence. None is downloaded."""

import pytest
from test_prepared import GREY, LABELS, STILLS
from toys import examples, toy

from cssm.config import Config, UserError
from cssm.data import downloaded
from cssm.data.downloaded import download

tfds = pytest.importorskip("tensorflow_datasets")


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    def missing(module):
        def fail(*_args):
            raise ModuleNotFoundError(f"No module named '{module}'", name=module)

        return fail

    monkeypatch.setattr(downloaded, "prepare", missing("tensorflow"))
    return lambda module: monkeypatch.setattr(downloaded, "prepare", missing(module))


def refusal(root, dataset):
    with pytest.raises(UserError) as error:
        download(Config(dataset=dataset, data_dir=str(root)))
    assert error.value.exit_code == 2 and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "dataset, sentence",
    [
        ("tfds:mnits", "this TFDS has no mnits (data sets of videos it knows only where TensorFlow is installed"),
        ("tfds:mnits", "did you mean tfds:mnist?"),
        ("tfds:zzzzzz", "its catalogue lists what it has"),
        (
            "tfds:mnist",
            "preparing tfds:mnist needs TensorFlow, which is not installed: type pip install 'cssm[prepare]'",
        ),
        ("tfds:mnist:9.9.9", "cannot be loaded at version 9.9.9, only: 3.0.1"),
        ("tfds:imagenet_resized/7x7", "BuilderConfig 7x7 not found"),
        ("tfds:ag_news_subset", "has none of Image of uint8 among its features"),
        ("tfds:mnist/", "must be tfds:NAME"),
    ],
)
def test_what_cannot_be_prepared_is_told_in_one_sentence(tmp_path, capsys, dataset, sentence):
    assert sentence in refusal(tmp_path, dataset)
    assert capsys.readouterr().out == ""


def test_other_modules_are_named(tmp_path, no_download):
    no_download("bs4")
    assert "needs bs4, which is not installed: type pip install 'cssm[prepare]' bs4" in refusal(tmp_path, "tfds:mnist")
    no_download("importlib_resources")
    assert "needs importlib-resources, which" in refusal(tmp_path, "tfds:mnist")


def test_what_fails_on_the_way_is_told_and_a_full_disk_is_not_swallowed(tmp_path, monkeypatch):
    def fails(error):
        def fail(*_args):
            raise error

        monkeypatch.setattr(downloaded, "prepare", fail)

    fails(ConnectionError("no route\nto host"))
    assert "tfds:mnist cannot be prepared: no route to host" in refusal(tmp_path, "tfds:mnist")
    fails(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        download(Config(dataset="tfds:mnist", data_dir=str(tmp_path)))


def test_what_is_there_is_not_prepared_again(tmp_path, monkeypatch):
    folder = toy(tmp_path, {"train": examples(STILLS[:6], LABELS[:6])}, GREY)
    builder = tfds.builder_from_directory(folder)
    monkeypatch.setattr(tfds, "builder", lambda *_args, **_kwargs: builder)
    assert download(Config(dataset="tfds:toy", data_dir=str(tmp_path))) == (folder, {"train": 6}, True)
