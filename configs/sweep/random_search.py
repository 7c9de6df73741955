# python configs/sweep/random_search.py runs/sweep --trials 8 -- --arch vit --epochs 4
# Random search over learning rate and weight decay: a run for each trial, all with the flags behind the two dashes,
# then the runs side by side and what to type for the best. Started again it leaves finished trials alone and goes on
# with a trial that was stopped. Rehearsed on 2 CPU cores with two trials of two steps; other ranges: edit SPACE.
"""Random search: the simplest sweep, and hard to beat for two or three settings (Bergstra and Bengio 2012)."""

import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path

MAIN = Path(__file__).resolve().parents[2] / "main.py"
# Setting: (lowest, highest), drawn evenly over the logarithm.
SPACE = {"lr": (3e-4, 3e-2), "weight_decay": (1e-5, 1e-1)}


def draw(seed: int) -> dict[str, str]:
    """The settings of a trial: the same for the same number."""
    numbers = random.Random(seed)
    return {n: f"{math.exp(numbers.uniform(math.log(a), math.log(b))):.3g}" for n, (a, b) in SPACE.items()}


def finished(run: Path) -> float | None:
    """The best val accuracy of a run that reached its end."""
    metrics = run / "metrics.jsonl"
    events = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    ends = [event for event in events if event["event"] == "summary"]
    return ends[-1]["best"]["accuracy"] if ends else None


def main() -> int:
    """Run the trials that are left; the exit code is that of the first one that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the runs are kept, one folder each")
    parser.add_argument("--trials", type=int, default=8, help="followed by two dashes and flags of main.py for all")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    given, common = parser.parse_args(words[:at]), words[at + 1 :]
    scores = {}
    for number in range(given.trials):
        name, settings = f"trial{number:03}", draw(number)
        flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
        if finished(given.folder / name) is None:
            where = ["--checkpoint_dir", str(given.folder), "--run_name", name, "--resume", "auto", "--quiet"]
            print(f"{name}: {' '.join(flags)}", flush=True)
            code = subprocess.run([sys.executable, str(MAIN), *common, *flags, *where]).returncode
            if code != 0 and code != 5:  # 5: the loss was not finite, which is an answer too
                return code
        scores[name] = (finished(given.folder / name) or 0.0, flags)
    code = subprocess.run([sys.executable, str(MAIN), "compare", str(given.folder)]).returncode
    best = max(scores, key=lambda name: scores[name][0])
    print(f"best: {best} (val {scores[best][0]:.3f}), type main.py {' '.join([*common, *scores[best][1]])}")
    return code


if __name__ == "__main__":
    sys.exit(main())
