"""configs/sweep/: a search really runs, goes on where it stopped, and names the best of its trials."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cssm.config import parse_args

ROOT = Path(__file__).resolve().parents[1]
SEARCH = ROOT / "configs" / "sweep" / "random_search.py"
TINY = "--cssm no_gate --embed_dim 4 --seq_len 2 --max_steps 2 --max_train_examples 64 --max_eval_examples 16".split()


def test_the_header_is_a_command_that_main_takes():
    (flags,) = re.findall(r"^# python configs/sweep/random_search.py .* -- (.*)$", SEARCH.read_text(), re.MULTILINE)
    parse_args(flags.split())


@pytest.mark.slow
def test_two_trials_are_run_once_each_and_the_better_one_is_told(tmp_path):
    command = [sys.executable, SEARCH, str(tmp_path), "--trials", "2", "--", *TINY, "--num_devices", "1"]
    outputs = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert outputs[0].count("RUN SUMMARY") == 2 and "RUN SUMMARY" not in outputs[1]
    best = {}
    for run in tmp_path.iterdir():
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        best[run.name] = events[-1]["best"]["accuracy"]
    assert sorted(best) == ["trial000", "trial001"]
    name, score, told = re.findall(r"best: (\w+) \(val ([\d.]+)\), type main.py (.*)", outputs[1])[0]
    assert best[name] == max(best.values()) == pytest.approx(float(score), abs=1e-3)
    rates = {parse_args(told.split()).config.lr, *re.findall(r"lr=([\d.e-]+)", outputs[1])}
    assert len(rates) > 2, "each trial has settings of its own"


@pytest.mark.slow
def test_a_trial_that_fails_ends_the_search_with_its_code(tmp_path):
    command = [sys.executable, SEARCH, str(tmp_path), "--trials", "2", "--", "--cssm", "no_such_cell"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.count("error: ") == 1
