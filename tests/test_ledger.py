"""What a benchmark leaves: rows, their ratios, and two files that agree."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from cssm import ledger as module
from cssm.config import resolve
from cssm.ledger import COLUMNS, Ledger, commit

FACTS = {"platform": "gpu", "num_devices": 4, "devices": [{"kind": "NVIDIA H100"}] * 4}
FACTS |= {"versions": {"python": "3.12.1", "NVIDIA driver": "580.1"}, "host": {"cpu_cores": 9, "memory_bytes": 5}}


def row(devices, batch_size, images_per_s, program="cssm", **more):
    found = {"program": program, "devices": devices, "batch_size": batch_size, "images_per_s": images_per_s}
    found |= {"effective_batch": devices * batch_size, "step_ms": 12.345, "step_ms_quartiles": [12.0, 13.0]}
    return found | {"data_wait_ms": 0.5, "peak_bytes_per_device": 3 * 2**30, "mfu": 0.4321} | more


def ledger(tmp_path, **settings):
    return Ledger(tmp_path, resolve(settings, {}), FACTS, "main.py bench --devices 1,2")


def cells(lines):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_both_files_hold_every_row_as_soon_as_it_is_there(tmp_path):
    book = ledger(tmp_path)
    for n, rate in ((1, 1000.0), (2, 1900.0)):
        book.add(row(n, 32, rate))
        found = json.loads((tmp_path / "bench.json").read_text())
        assert [r["devices"] for r in found["rows"]] == list(range(1, n + 1))
        assert len(cells((tmp_path / "bench.md").read_text().splitlines())) == 1 + n
    head, first, second = cells(book.lines())
    assert head[:2] == ["devices", "batch_size"] and "program" not in head and "ratio to torch" not in head
    assert first == ["1", "32", "32", "12.35", "12.00 to 13.00", "1,000", "1.00", "100.0%", "0.50", "3.00", "43.2%"]
    assert second[5:8] == ["1,900", "1.90", "95.0%"]


def test_the_files_say_what_the_rows_depend_on(tmp_path):
    ledger(tmp_path, scaling="strong", steps=7, dtype="bf16").add(row(1, 32, 1.0))
    found = json.loads((tmp_path / "bench.json").read_text())
    page = (tmp_path / "bench.md").read_text()
    assert found["command"] == "main.py bench --devices 1,2" and found["command"] in page
    assert (found["card"], found["platform"], found["visible_devices"]) == ("NVIDIA H100", "gpu", 4)
    assert found["versions"]["NVIDIA driver"] == "580.1" and "NVIDIA driver 580.1" in page
    assert found["config"]["dtype"] == "bf16" and (found["scaling"], found["steps"]) == ("strong", 7)
    assert "commit" in found and "4 x NVIDIA H100 (gpu), 9 cores of " in page


@pytest.mark.parametrize(
    "scaling,rows,expected",
    [
        # what is relative to what: the first row of the same batch of a device, or of all together
        ("weak", [(1, 16, 100), (2, 16, 150), (1, 32, 400), (2, 32, 800)], [(1, 1), (1.5, 0.75), (1, 1), (2, 1)]),
        ("strong", [(1, 16, 100), (2, 8, 150), (1, 32, 400), (2, 16, 800)], [(1, 1), (1.5, 0.75), (1, 1), (2, 1)]),
        ("weak", [(2, 16, 100), (8, 16, 200)], [(1, 1), (2, 0.5)]),
    ],
)
def test_speed_up_and_efficiency(tmp_path, scaling, rows, expected):
    book = ledger(tmp_path, scaling=scaling)
    found = [book.add(row(*values)) for values in rows]
    assert [(r["speedup"], r["efficiency"]) for r in found] == expected


def test_a_peer_has_rows_and_a_base_of_its_own(tmp_path):
    book = ledger(tmp_path)
    for devices, ours, theirs in ((1, 200.0, 100.0), (2, 400.0, 150.0)):
        book.add(row(devices, 16, ours, ratio_to_peer=ours / theirs))
        book.add(row(devices, 16, theirs, "torch", mfu=None, data_wait_ms=None))
    head, *rows = cells(book.lines())
    assert head[0] == "program" and head[-1] == "ratio to torch"
    assert [r[0] for r in rows] == ["cssm", "torch", "cssm", "torch"]
    assert [r[head.index("efficiency")] for r in rows] == ["100.0%", "100.0%", "100.0%", "75.0%"]
    assert [r[-1] for r in rows] == ["2.00", "-", "2.67", "-"]
    assert rows[1][head.index("data wait ms")] == rows[1][head.index("MFU")] == "-"


def test_notes_are_kept_below_the_table(tmp_path):
    book = ledger(tmp_path)
    book.add(row(1, 16, 1.0))
    book.note("out of memory at 32")
    assert book.lines()[-1] == "note: out of memory at 32"
    assert json.loads((tmp_path / "bench.json").read_text())["notes"] == ["out of memory at 32"]
    assert "out of memory at 32" in (tmp_path / "bench.md").read_text()


def test_a_row_that_waits_for_data_is_told_once_with_advice(tmp_path):
    book = ledger(tmp_path, num_workers=0)
    for devices, wait_ms in ((1, 4.9), (2, 5.1), (4, 5.1)):
        book.add(row(devices, 16, 160.0 * devices, data_wait_ms=wait_ms))
    (note,) = book.notes
    assert note.startswith("in the row of 2 devices, batch_size 16, 5% of the time was spent waiting for data: less ")
    assert "--num_workers 9 (now 0)" in note and note in (tmp_path / "bench.md").read_text()


def test_every_column_is_a_field_of_a_row():
    """So that whoever reads the JSON finds there what the table shows."""
    whole = row(1, 1, 1.0, speedup=1.0, efficiency=1.0, ratio_to_peer=1.0, num_workers=1)
    assert COLUMNS.keys() <= whole.keys()
    assert all(write(whole) for _, write in COLUMNS.values())


def test_the_commit_is_that_of_this_checkout_alone(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "x")
    assert commit(tmp_path) == git("rev-parse", "--short=7", "HEAD")
    (tmp_path / "untracked").mkdir()
    assert commit(tmp_path / "untracked") is None, "installed within another project's checkout"
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path).endswith("-dirty")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=128, stdout=""))
    assert commit(tmp_path) is None
