#!/usr/bin/env bash
# bash configs/launch/run_all.sh [FOLDER]
# Everything, on whatever is there: lists the devices, trains, evaluates the finished run once more, and measures the
# throughput of 1, 2, 4, ... devices with the same batch on each. FOLDER (output) gets results.json and a log of JSON
# lines for each part. TRAIN and BENCH hold the flags of the training and of the measured runs, PYTHON the interpreter.
# Rehearsed on 4 simulated CPU devices, whose throughput means nothing: they share the cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
output=${1:-output}
mkdir -p "$output"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi

# One part: its events to a file, its messages to the screen.
run() {
    local log="$output/$1.jsonl"
    shift
    echo "main.py $*"
    "$PYTHON" main.py "$@" --headless >"$log"
}

# A figure from the events of a part: `value part expression of events`, a dict from the kind of an event to the last.
value() {
    "$PYTHON" -c 'import json, sys
events = {event["event"]: event for event in map(json.loads, open(sys.argv[1], encoding="utf-8"))}
print(eval(sys.argv[2]))' "$output/$1.jsonl" "$2"
}

run devices devices
count=$(value devices 'events["devices"]["num_devices"]')
platform=$(value devices 'events["devices"]["platform"]')
echo "found $count x $platform"

read -ra train <<<"${TRAIN:---arch vit --cssm hgru_bi}"
run train "${train[@]}" --checkpoint_dir "$output/runs"
run evaluate --resume "$(value train 'events["summary"]["run_dir"]')"

if [ "$platform" = cpu ]; then
    bench='--arch vit --cssm hgru_bi --batch_size 32 --max_steps 60'
else
    bench='--arch vit --cssm hgru_bi --preset tiny --image_size 128 --batch_size 32 --bf16 --max_steps 100'
fi
read -ra bench <<<"${BENCH:-$bench}"
sizes=()
for ((n = 1; n < count; n *= 2)); do sizes+=("$n"); done
for n in "${sizes[@]}" "$count"; do
    run "devices_$n" "${bench[@]}" --num_devices "$n" --log_every 5 --eval_every 1000000 --max_eval_examples 16 \
        --checkpoint_dir "$output/runs"
done

"$PYTHON" - "$output" "${sizes[@]}" "$count" <<'PY'
import json
import statistics
import sys
from pathlib import Path

output, sizes = Path(sys.argv[1]), [int(n) for n in sys.argv[2:]]


def events(part, kind):
    lines = (output / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


table = []
for n in sizes:
    (config,) = events(f"devices_{n}", "config")
    # The first two windows hold the first step and what the host was ahead.
    steps = events(f"devices_{n}", "step")[2:]
    row = {"devices": n, "batch_size": config["batch_size"], "effective_batch": config["effective_batch"]}
    for name in ("images_per_s", "step_ms", "data_wait_ms"):
        row[name] = statistics.median(step[name] for step in steps)
    row["windows"] = len(steps)
    row["speedup"] = row["images_per_s"] / (table[0]["images_per_s"] if table else row["images_per_s"])
    row["efficiency"] = row["speedup"] / n
    table.append(row)

(devices,), (summary,) = events("devices", "devices"), events("train", "summary")
(evaluation,) = [event for event in events("evaluate", "eval") if event["split"] == "test"]
assert abs(evaluation["accuracy"] - summary["test"]["accuracy"]) < 0.01, "the finished run now evaluates otherwise"
results = {"devices": devices, "train": summary, "evaluate": evaluation, "throughput": table}
(output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
print(f"test accuracy {evaluation['accuracy']:.4f} of {evaluation['count']}")
print("devices  batch  images/s  step ms  data wait ms  speed-up  efficiency")
for row in table:
    print(
        f"{row['devices']:>7}  {row['effective_batch']:>5}  {row['images_per_s']:>8,.0f}  {row['step_ms']:>7.1f}  "
        f"{row['data_wait_ms']:>12.2f}  {row['speedup']:>7.2f}x  {row['efficiency']:>9.1%}"
    )
PY
echo "results in $output/results.json"
