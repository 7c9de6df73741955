"""The input alone: what is timed, what is refused, and PyTorch's side as far as it can be seen without PyTorch."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image

from cssm import bench, cli, input_rate
from cssm.config import UserError, parse_args, resolve
from cssm.data import load, outline
from cssm.data.pipeline import step_indices

SIZE = 8


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """24 small JPEGs of two classes."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(24):
        path = root / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).save(path)
    return root


def config(photos, **settings):
    common = {"dataset": "folder", "data_dir": str(photos), "image_size": SIZE, "input": "data", "steps": 4}
    return resolve({**common, "global_batch_size": 4, "num_workers": 1, **settings}, {})


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(input_rate.time, "perf_counter", lambda: now[0])
    return now


def test_only_the_batches_after_the_first_are_timed(photos, clock):
    taken = []

    def batches():
        for number in range(100):
            clock[0] += 9 if number < input_rate.BURN_IN else 0.5
            taken.append(number)
            yield number

    row = input_rate.timed(config(photos), batches())
    assert row == {"num_workers": 1, "batch_size": 4, "images_per_s": 4 / 0.5}
    assert len(taken) == input_rate.BURN_IN + 4


def test_a_batch_that_does_not_come_ends_the_row():
    code = "import time\nfrom cssm import input_rate\nfrom cssm.config import Config\n"
    code += "def batches_that_hang():\n    yield 1\n    time.sleep(60)\n"
    code += "input_rate.timed(Config(stall_timeout=0.5), batches_that_hang())"
    root = Path(__file__).resolve().parents[1]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=50)
    assert result.returncode == 4 and "batches_that_hang" in result.stderr
    assert "nothing has moved for 0.5 s, the program waits for a batch: rows before" in result.stderr


@pytest.mark.parametrize("prefetch", [0, 3])
def test_it_takes_the_batches_of_training_and_as_many_are_ahead_at_both_ends(photos, monkeypatch, prefetch):
    asked = []
    real = input_rate.train_batches

    def watched(source, batch, seed, first, last, **how):
        asked.append((len(source), batch, seed, first, last, how))
        return real(source, batch, seed, first, last, **how)

    monkeypatch.setattr(input_rate, "train_batches", watched)
    settings = config(photos, prefetch=prefetch, seed=5)
    assert input_rate.measure(settings)["images_per_s"] > 0
    n = outline(settings).examples["train"]
    assert asked == [(n, 4, 5, 1, input_rate.BURN_IN + 4 + prefetch, {"workers": 1, "prefetch": prefetch})]


def test_rows_are_batches_by_workers(photos):
    both = config(photos, worker_counts="2,0", batch_sizes="2,4", global_batch_size=None)
    points = bench.input_plan(both, outline(both))
    assert [(p.global_batch_size, p.num_workers) for p in points] == [(2, 2), (2, 0), (4, 2), (4, 0)]
    one = config(photos)
    assert [(p.global_batch_size, p.num_workers) for p in bench.input_plan(one, outline(one))] == [(4, 1)]
    large = config(photos, global_batch_size=999)
    with pytest.raises(UserError, match="one step takes 999"):
        bench.input_plan(large, outline(large))


@pytest.mark.parametrize(
    "flags,words",
    [
        ("--input data --devices 1,2", "--devices 1,2 does not apply with --input data"),
        ("--input data --scaling strong", "--scaling strong does not apply with --input data"),
        ("--input data --profile t", "--profile t traces steps, and --input data takes none"),
        ("--worker_counts 1,2", "--worker_counts 1,2 does not apply with --input pipeline"),
        ("--input data --worker_counts 1,1", "must be different numbers from 0 on"),
        ("--input data --peer torch", "it needs --input"),
        ("--input data --peer torch --dataset folder --data_dir x --prefetch 0", "type --prefetch 1 or more"),
    ],
)
def test_what_has_no_meaning_is_refused(flags, words):
    with pytest.raises(UserError) as refused:
        parse_args(["bench", *flags.split()])
    assert words in str(refused.value)


class Loader:
    """torch's DataLoader as documented, in one process: the examples of each list of the batch sampler."""

    made = None

    def __init__(self, dataset, *, batch_sampler, num_workers, prefetch_factor):
        assert (prefetch_factor is None) == (num_workers == 0), "what torch wants"
        self.dataset, self.batches, self.prefetch = dataset, batch_sampler, prefetch_factor
        Loader.made = self

    def __iter__(self):
        return ([self.dataset[i] for i in batch] for batch in self.batches)


@pytest.fixture
def torch(monkeypatch):
    vision = MagicMock()
    vision.Compose.side_effect = lambda steps: lambda image: (image.mode, image.size)
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(utils=SimpleNamespace(data=SimpleNamespace(DataLoader=Loader)))
    )
    monkeypatch.setitem(sys.modules, "torchvision", MagicMock(transforms=vision))
    monkeypatch.setitem(sys.modules, "torchvision.transforms", vision)
    return vision


@pytest.mark.parametrize("workers", [0, 2])
def test_the_peer_is_given_the_same_files_in_the_same_batches(photos, torch, workers):
    settings = config(photos, num_workers=workers, prefetch=3, peer="torch")
    row = input_rate.measure_peer(settings)
    assert (row["num_workers"], row["batch_size"]) == (workers, 4) and row["images_per_s"] > 0
    loader, source = Loader.made, load(settings, "train")
    assert loader.prefetch == (3 if workers else None)
    assert len(loader.batches) == input_rate.BURN_IN + 4 + 3 * workers
    assert loader.batches[6] == step_indices(len(source), 4, 0, 7).tolist()
    assert len(loader.dataset) == len(source)
    labels = [loader.dataset[i][1] for i in range(len(source))]
    assert labels == source.gather(np.arange(len(source)))[1].tolist()
    assert loader.dataset[0][0] == ("RGB", (16, 12)), "decoded in full"


def test_its_operations_are_ours(photos, torch):
    input_rate._transform(config(photos, crop_scale=0.3))
    assert torch.RandomResizedCrop.call_args == ((SIZE,), {"scale": (0.3, 1.0)})
    assert torch.RandomHorizontalFlip.called and torch.PILToTensor.called and not torch.CenterCrop.called
    torch.reset_mock()
    input_rate._transform(config(photos, crop_scale=1.0, flip=False))
    assert torch.Resize.call_args.args == torch.CenterCrop.call_args.args == (SIZE,)
    assert not torch.RandomHorizontalFlip.called


def test_one_command_makes_a_table(photos, tmp_path, monkeypatch, capsys):
    """Each row in a process of its own; here in this one, with PyTorch half as fast."""
    facts = {"platform": "cpu", "num_devices": 1, "devices": [{"kind": "cpu"}], "versions": {}}
    facts |= {"host": {"cpu_cores": 2, "memory_bytes": 5}}
    row = lambda settings, rate: {"num_workers": settings.num_workers, "batch_size": 4, "images_per_s": rate}
    rates = {input_rate.measure: 100.0, input_rate.measure_peer: 50.0}
    apart = lambda fn, settings: row(settings, rates[fn] * (1 + settings.num_workers)) if fn in rates else facts
    monkeypatch.setattr(bench, "apart", apart)
    monkeypatch.setattr(bench.peer, "check_installed", lambda needed: needed)
    argv = ["bench", "--input", "data", "--dataset", "folder", "--data_dir", str(photos), "--worker_counts", "0,1"]
    argv += ["--batch_size", "4", "--peer", "torch", "--output", str(tmp_path / "out")]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "cssm with 1 workers, batch_size 4: 200 images/s" in said
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line[:2] == "| "]
    assert table[0] == ["program", "workers", "batch_size", "images/s", "speed-up", "ratio to torch"]
    assert table[3] == ["cssm", "1", "4", "200", "2.00", "2.00"] and table[4][:2] == ["torch", "1"]
    page, saved = (tmp_path / "out" / "bench.md").read_text(), json.loads((tmp_path / "out" / "bench.json").read_text())
    assert "20 batches of folder, prefetch 2" in page and "scaling" not in page and len(saved["rows"]) == 4


def test_what_the_peer_needs_is_named(photos, capsys):
    if any(name in sys.modules for name in input_rate.NEEDED):
        pytest.skip("it is here")
    argv = ["bench", "--input", "data", "--dataset", "folder", "--data_dir", str(photos), "--peer", "torch"]
    assert cli.main([*argv, "--batch_size", "4"]) == 2
    assert "--peer torch needs torch and torchvision" in capsys.readouterr().err
