"""The verb predict, as typed: the same answers on any number of devices, in the order of the inputs."""

import json

import numpy as np
import pytest
from PIL import Image
from trained import make_run

from cssm import load_trained
from cssm.cli import main
from cssm.config import parse_args
from cssm.inference.predict import predict

rng = np.random.default_rng(0)
ARRAYS = rng.integers(0, 256, (7, 8, 8, 1), np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("predict") / "run", kernel_domain="spectral")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Seven images of the model's own size, which decoding leaves as they are, and two other files."""
    folder = tmp_path_factory.mktemp("photos")
    for i, pixels in enumerate(ARRAYS):
        Image.fromarray(pixels[..., 0]).save(folder / f"{i}.png")
    (folder / "notes.txt").write_text("x")
    (folder / "Thumbs.db").write_text("x")
    return folder


def asked(run, tmp_path, *more):
    """(what predict returns, the rows that it wrote)"""
    path = tmp_path / "out.jsonl"
    argv = [
        "predict",
        "--checkpoint",
        str(run),
        "--quiet",
        "--no_compile_cache",
        "--output",
        str(path),
        *map(str, more),
    ]
    parsed = parse_args(argv)
    facts = predict(parsed.config, parsed.typed, parsed.paths)
    return facts, [json.loads(line) for line in path.read_text().splitlines()]


def test_seven_inputs_on_four_devices_are_those_on_one_and_of_the_model(run, files, tmp_path):
    logits = load_trained(run).logits(ARRAYS).astype(np.float64)
    wanted = np.exp(logits - logits.max(axis=1, keepdims=True))
    wanted /= wanted.sum(axis=1, keepdims=True)
    for devices in (1, 4):
        facts, rows = asked(run, tmp_path, "--input", files, "--num_devices", devices, "--top_k", 10)
        assert (facts["count"], facts["skipped"], facts["devices"]) == (7, 0, devices)
        assert [row["input"] for row in rows] == [str(files / f"{i}.png") for i in range(7)]
        for row, truth in zip(rows, wanted, strict=True):
            found = {guess["label"]: guess["probability"] for guess in row["top"]}
            np.testing.assert_allclose([found[c] for c in range(10)], truth, atol=1e-6)
            assert row["label"] == int(truth.argmax()) and row["probability"] == max(found.values())
            assert [guess["probability"] for guess in row["top"]] == sorted(found.values(), reverse=True)


def test_arrays_and_files_may_be_mixed_and_keep_their_order(run, files, tmp_path):
    np.savez(tmp_path / "x.npz", images=ARRAYS)
    more = [files / "3.png", tmp_path / "x.npz", "--input", files / "1.png", files / "0.png"]
    _, rows = asked(run, tmp_path, *more, "--batch_size", 2, "--num_devices", 2)
    order = [3, *range(7), 1, 0]
    assert [row["input"] for row in rows][:2] == [str(files / "3.png"), f"{tmp_path / 'x.npz'}[0]"]
    logits = load_trained(run).logits(ARRAYS)
    assert [row["label"] for row in rows] == logits[order].argmax(axis=1).tolist()
    assert all(len(row["top"]) == 5 for row in rows), "the default"


def test_what_cannot_be_read_is_skipped_counted_and_ends_with_code_2(run, files, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"x")
    out = tmp_path / "out.csv"
    argv = ["predict", "--checkpoint", str(run), "--no_compile_cache", "--output", str(out), "--num_devices", "2"]
    argv += ["--input", str(files / "0.png"), str(tmp_path / "bad.png"), str(files / "1.png")]
    assert main(argv) == 2
    told = capsys.readouterr()
    assert f"warning: {tmp_path / 'bad.png'} cannot be read and is left out" in told.err
    assert "error: 1 of 3 inputs could not be read" in told.err and "the others were predicted" in told.err
    assert "predicted 2 images" in told.out and "images/s" in told.out
    assert len(out.read_text().splitlines()) == 3


def test_not_one_that_can_be_read(run, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"x")
    argv = [
        "predict",
        "--checkpoint",
        str(run),
        "--no_compile_cache",
        str(tmp_path),
        "--output",
        str(tmp_path / "o.csv"),
    ]
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert "1 of 1 inputs could not be read" in told and told.endswith("repair or remove them\n")
    assert len((tmp_path / "o.csv").read_text().splitlines()) == 1


def test_the_screen_tells_the_answers_and_what_was_left_aside(run, files, capsys):
    argv = ["predict", "--checkpoint", str(run), "--no_compile_cache", "--input", str(files), "--top_k", "1"]
    assert main([*argv, "--num_devices", "4"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "Running on 4 devices (multi-CPU enabled)" in told
    assert "note: left aside what is no image: 2 files" in told
    assert len([line for line in told if line.startswith(f"{files}/")]) == 7


@pytest.mark.parametrize(
    "more, sentence",
    [
        ([], "predict needs images: type --input"),
        (["--top_k", "11", "x.png"], "--top_k 11: the model tells 10 classes apart"),
        (["--output", "x.txt", "x.png"], "predictions are written as .jsonl or .csv"),
        (["nowhere.png"], "there is no such file or folder"),
        (["--lr", "1"], "--lr does not apply to the verb predict"),
        (["--nproc_per_node", "2"], "--nproc_per_node does not apply to the verb predict"),
        (["--checkpoint", "nowhere", "x.png"], "there is no such path"),
    ],
)
def test_mistakes_end_with_one_sentence(run, more, sentence, capsys):
    assert main(["predict", "--checkpoint", str(run), "--no_compile_cache", *more]) == 2
    assert sentence in capsys.readouterr().err


def test_a_process_of_a_job_is_refused(run, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["predict", "--checkpoint", str(run), "x.png"]) == 2
    assert "predict uses all devices from one process" in capsys.readouterr().err


def test_explanations_are_drawn_for_each_image(run, files, tmp_path):
    folder = tmp_path / "why"
    facts, rows = asked(run, tmp_path, files, "--explain", folder, "--num_devices", 2, "--batch_size", 2)
    stems = [f"{i}_{i}.png" for i in range(7)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{stem}_{kind}" for stem in stems for kind in ("saliency.png", "states.gif")
    )
    with Image.open(folder / "3_3.png_states.gif") as gif:
        assert gif.n_frames == 2
    plain = asked(run, tmp_path, files, "--num_devices", 2, "--batch_size", 2)[1]
    for a, b in zip(rows, plain, strict=True):
        assert a["label"] == b["label"] and a["probability"] == pytest.approx(b["probability"], abs=1e-6)
    assert facts["count"] == 7


def test_clips_are_predicted_and_explained_frame_by_frame(tmp_path):
    clips = rng.integers(0, 256, (12, 4, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "train.npz", clips=clips, labels=np.arange(12) % 2)
    run = make_run(tmp_path / "run", dataset="npz", data_dir=str(tmp_path / "train.npz"), seq_len=4)
    clips = clips[:3]
    np.savez(tmp_path / "x.npz", clips=clips)
    _, rows = asked(run, tmp_path, tmp_path / "x.npz", "--num_devices", 1, "--explain", tmp_path / "why")
    assert [row["label"] for row in rows] == load_trained(run).logits(clips).argmax(axis=1).tolist()
    assert len(rows[0]["top"]) == 2, "all classes, where they are fewer than five"
    with Image.open(tmp_path / "why" / "2_x.npz_2_states.gif") as gif:
        assert gif.n_frames == 4
