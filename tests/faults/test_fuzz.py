"""Whatever a file or a command line holds, it is read or refused with a clean error: mutations from fixed seeds."""

import json
import random
import struct
from collections.abc import Callable

import pytest
from on_disk import encoded, framed
from test_checkpoint import TARGET, fill

from cssm.checkpoint import Checkpoints, step_folder
from cssm.config import KNOBS, Config, UserError, parse_args, read_yaml, resolve
from cssm.data import tfrecord
from cssm.report import events, read_events
from cssm.report.events import EventLog
from cssm.resume import resume_config, resume_record
from cssm.runs import saved

WORDS = [
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "1" * 5000,
    "true",
    "None",
    "../../etc",
    "\0",
    "💥",
    "--",
    "=",
    "",
    "{}",
    "[1]",
]
WORDS += ["vit", "gated", "32", "0.5", "auto", "&a *a", "!!python/object:os.system x", "1_000", "0x10", "5k", "٣"]
FLAGS = [f"--{name}" for name in KNOBS]
ROUNDS = [pytest.param(100, id="quick"), pytest.param(4000, id="long", marks=pytest.mark.slow)]


def mutated(draw: random.Random, data: bytes) -> bytes:
    """With some bytes flipped, cut, repeated, swapped for numbers at the edge of their range, or for words."""
    content = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content) + 1)
        what = draw.randrange(7)
        if what == 0:
            content[at : at + 1] = bytes([draw.randrange(256)])
        elif what == 1:
            del content[at : at + draw.randint(1, 40)]
        elif what == 2:
            content[at:at] = content[at : at + draw.randint(1, 60)] * draw.randint(1, 5)
        elif what == 3:
            content[at : at + 8] = struct.pack("<Q", draw.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        elif what == 4:
            content[at:at] = draw.choice(WORDS).encode()
        elif what == 5:
            content[at:at] = draw.choice([b"[", b'{"a":', b"- ", b"? "]) * draw.choice([1, 1, 1, 1, 2000])
        else:
            del content[at:]
    return bytes(content)


def fuzz(
    rounds: int, seed: int, read: Callable[[random.Random], object], clean: tuple[type[BaseException], ...]
) -> int:
    """How many of `rounds` inputs were read, the others being refused; fails, naming the input, for any other error."""
    read_count = 0
    for number in range(rounds):
        draw = random.Random(f"{seed} {number}")
        try:
            read(draw)
            read_count += 1
        except clean:
            pass
        except BaseException as error:
            raise AssertionError(f"input {number} of seed {seed}: {type(error).__name__}: {error}") from error
    return read_count


@pytest.mark.parametrize("rounds", ROUNDS)
def test_command_lines(rounds, capsys):
    def read(draw):
        argv = ["train"] if draw.random() < 0.1 else []
        for _ in range(draw.randint(1, 4)):
            name = draw.choice(FLAGS)
            knob = KNOBS[name[2:]]
            fit = [*knob.choices, str(knob.default), "1", "8", "0.25"]
            value = draw.choice(fit if draw.random() < 0.6 else WORDS)
            if draw.random() < 0.1:
                name = mutated(draw, name.encode()).decode(errors="surrogateescape")
            argv += [f"{name}={value}"] if draw.random() < 0.5 else [name, value]
        assert isinstance(parse_args(argv).config, Config)

    assert 0 < fuzz(rounds, 1, read, (UserError, SystemExit)) < rounds


@pytest.mark.parametrize("rounds", ROUNDS)
def test_yaml(rounds, tmp_path):
    good = b"# a run\nmodel:\n  arch: vit\n  embed_dim: 32\nlr: 1e-3\ngpus: [0, 1]\nremat: true\nrun_name: 'x'\n"
    path = tmp_path / "run.yaml"

    def read(draw):
        path.write_bytes(mutated(draw, good))
        assert isinstance(resolve({}, read_yaml(path)), Config)

    assert 0 < fuzz(rounds, 2, read, (UserError,)) < rounds


@pytest.mark.parametrize("rounds", ROUNDS)
def test_metrics(rounds, tmp_path, monkeypatch):
    """Reading never fails, nor does appending; what is appended is whole, and the last that is read."""
    monkeypatch.setattr(events.time, "time", lambda: 1764400000.0)
    log = EventLog(tmp_path)
    for step in range(1, 6):
        log.write("step", {"step": step, "loss": 0.5})
        log.write("eval", {"step": step, "split": "val", "count": 3})
    log.close()
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes()

    def read(draw):
        path.write_bytes(mutated(draw, good))
        log = EventLog(tmp_path)
        log.write("step", {"step": 10**9, "loss": 0.25})
        log.close()
        assert read_events(path)[-1]["loss"] == 0.25
        assert path.read_bytes().endswith(b'"loss": 0.25, "time": 1764400000.0}\n')

    assert fuzz(rounds, 3, read, ()) == rounds


@pytest.mark.parametrize("rounds", ROUNDS)
def test_tfrecords(rounds, tmp_path):
    good = b"".join(framed(encoded(image=[b"png"], label=[number])) for number in range(3))
    path = tmp_path / "a.tfrecord"

    def read(draw):
        tfrecord._known.cache_clear()
        if draw.random() < 0.5:  # an intact frame around what is none
            tfrecord.example(mutated(draw, encoded(image=[b"png"], label=[1])))
            return
        path.write_bytes(mutated(draw, good))
        for record in tfrecord.records(path, None):
            tfrecord.example(tfrecord.read(record))

    assert 0 < fuzz(rounds, 4, read, (ValueError,)) < rounds


@pytest.mark.parametrize("rounds", ROUNDS)
def test_records_of_checkpoints(rounds, tmp_path):
    """Of a checkpoint from elsewhere, whose digests may be right whatever it holds."""
    config = Config(arch="vit", cssm="gated", cache_dir="cache")  # the user's own may be of any length
    meta = {"step": 3, "best": {}, "skipped": 0, "data": {"classes": ["a"], "train_examples": 9}}
    record = {"meta": {**meta, "config": resume_record(config, 64, 1)}, "metric": 0.5, "arrays": {}}
    good = json.dumps(record).encode()
    folder = tmp_path / "3"
    (folder / "record").mkdir(parents=True)

    def read(draw):
        # Few of those that were changed are still JSON.
        (folder / "record" / "metadata").write_bytes(mutated(draw, good) if draw.random() < 0.9 else good)
        assert isinstance(resume_config(saved(tmp_path)["config"], {})[0], Config)

    assert 0 < fuzz(rounds, 5, read, (UserError,)) < rounds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of orbax's event loops
def test_files_of_checkpoints_with_digests_that_fit(tmp_path):
    """Orbax's own files too: what comes out is what the record says, or the checkpoint is damaged."""
    fill(tmp_path, [0.1])
    folder = tmp_path / "1"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != step_folder.FILES)
    contents = {path: path.read_bytes() for path in files}
    with Checkpoints(tmp_path) as checkpoints:

        def read(draw):
            path = draw.choice(files)
            path.write_bytes(mutated(draw, contents[path]))
            (folder / step_folder.FILES).write_text(json.dumps(step_folder._file_digests(folder)))
            try:
                checkpoints.restore(TARGET)
            finally:
                path.write_bytes(contents[path])

        fuzz(300, 6, read, (UserError,))


def test_the_generator_makes_other_inputs_every_time():
    inputs = {mutated(random.Random(number), b"some content of a file") for number in range(200)}
    assert len(inputs) > 150
