#!/usr/bin/env bash
# bash configs/launch/scaling.sh [FOLDER]
# How training scales over the devices that are there, in one call: parity and bandwidth, pmean_complex_safe beside the
# mean of as many bytes of float32, weak and strong scaling of ViT-S/16 (beside PyTorch, where torch and timm are) and
# of hgru_bi from cached Pathfinder, memory under --shard, and throughput of predict with the latter. FOLDER (scaling)
# gets a log for each part and a folder for each table, and scaling.md with all tables, also those of earlier calls; they
# are not measured again. PARTS chooses some of the parts below; VIT, HGRU and DATA hold the flags of the two models and
# of the images, PREDICTED the number of images predicted, MEAN_MIB the size of the means, STEPS the steps timed, PYTHON
# the interpreter.
# Rehearsed on 8 simulated CPU devices, whose throughput means nothing: they share the cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
output=${1:-scaling}
parts="parity means weak memory predict strong" # the last may end the call: a batch may not divide by the devices
: "${PYTHON:=python}" "${PARTS:=$parts}" "${PREDICTED:=4096}" "${STEPS:=20}"
for part in $PARTS; do
    case " $parts " in
    *" $part "*) ;;
    *)
        echo "error: no part $part in PARTS, type some of: $parts" >&2
        exit 2
        ;;
    esac
done
read -ra data <<<"${DATA:---dataset pathfinder --pathfinder_difficulty 14 --image_size 224 --max_train_examples 8192 --bf16}"
read -ra vit <<<"${VIT:---arch baseline --stem_mode patch --preset small --batch_size 256}"
read -ra hgru <<<"${HGRU:---arch vit --cssm hgru_bi --preset small --batch_size 16}"
peer=()
! "$PYTHON" -c 'import timm, torch' 2>/dev/null || peer=(--peer torch)
count=$("$PYTHON" -c 'import jax; print(jax.local_device_count())')
sizes=""
for ((n = 1; n < count; n *= 2)); do sizes+="$n,"; done
sizes+=$count
mkdir -p "$output"

# Whether a part was finished by an earlier call: `finished FOLDER flags`. With other flags it stays, and this call ends.
finished() {
    local flags="$1/finished_with"
    shift
    [ -e "$flags" ] || return 1
    [ "$(cat "$flags")" = "$*" ] || {
        echo "error: $(dirname "$flags") was made with other flags, type another FOLDER" >&2
        exit 2
    }
}

# A table of `bench`: `table NAME flags`.
table() {
    local folder="$output/$1"
    shift
    set -- "${data[@]}" --steps "$STEPS" "$@"
    if ! finished "$folder" "$@"; then
        rm -f "$folder/bench.json" "$folder/bench.md" # of a call that was ended
        "$PYTHON" main.py bench "$@" --output "$folder"
        echo "$*" >"$folder/finished_with"
    fi
    for folder in "$output"/{vit_weak,hgru_bi_weak,shard_none,shard_optimizer,shard_params,vit_strong,hgru_bi_strong}; do
        if [ -e "$folder/finished_with" ]; then
            printf '\n**%s**\n\n' "$(basename "$folder")"
            cat "$folder/bench.md"
        fi
    done >"$output/scaling.md"
}

for part in $PARTS; do
    case $part in
    parity)
        "$PYTHON" main.py devices --parity | tee "$output/parity.txt"
        ;;
    means)
        "$PYTHON" - "${MEAN_MIB:-1024}" <<'PY' | tee "$output/means.txt"
import statistics
import sys
import time

import jax
import numpy as np

from parallel.devices import AXIS, per_device, spmd
from parallel.sync import pmean_complex_safe

mib, devices = int(sys.argv[1]), jax.local_devices()
size = mib * 2**20


def seconds(mean, dtype):
    x = per_device(np.ones((len(devices), size // np.dtype(dtype).itemsize), dtype), devices)
    program = spmd(mean, devices)
    jax.block_until_ready(program(x))
    times = []
    for _ in range(12):
        began = time.perf_counter()
        jax.block_until_ready(program(x))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


plain = seconds(lambda x: jax.lax.pmean(x, AXIS), np.float32)
print(f"mean of {mib} MiB over {len(devices)} devices: pmean of float32 {plain * 1e3:.2f} ms")
for dtype in (np.float32, np.complex64):
    safe = seconds(pmean_complex_safe, dtype)
    print(f"pmean_complex_safe of {dtype.__name__} {safe * 1e3:.2f} ms, {safe / plain:.3f} times as long")
PY
        ;;
    weak | strong)
        table "vit_$part" "${vit[@]}" --devices "$sizes" --scaling "$part" "${peer[@]}"
        table "hgru_bi_$part" "${hgru[@]}" --devices "$sizes" --scaling "$part"
        ;;
    memory)
        for shard in none optimizer params; do
            table "shard_$shard" "${hgru[@]}" --devices "$count" --shard "$shard"
        done
        ;;
    predict)
        run="$output/runs/predict"
        if ! finished "$run" "${data[@]}" "${hgru[@]}"; then
            "$PYTHON" main.py "${data[@]}" "${hgru[@]}" --max_steps 2 --max_eval_examples 64 \
                --checkpoint_dir "$output/runs" --run_name predict --quiet
            echo "${data[*]} ${hgru[*]}" >"$run/finished_with"
        fi
        "$PYTHON" - "$output/images.npz" "$PREDICTED" "$run/config.yaml" <<'PY'
import sys

import numpy as np

from cssm.config import parse_args
from cssm.data import outline

path, number, config = sys.argv[1], int(sys.argv[2]), parse_args(["--config", sys.argv[3]]).config
images = np.random.default_rng(0).integers(0, 256, (number, *outline(config).image_shape), np.uint8)
np.savez(path, images=images)
PY
        for n in 1 "$count"; do
            rm -f "$output/predicted_$n.jsonl"
            "$PYTHON" main.py predict --checkpoint "$run" --input "$output/images.npz" --num_devices "$n" \
                --output "$output/predicted_$n.jsonl" | tee "$output/predict_$n.txt"
        done
        ;;
    esac
done
[ ! -e "$output/scaling.md" ] || cat "$output/scaling.md"
echo "results in $output"
