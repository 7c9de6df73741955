#!/usr/bin/env bash
# bash configs/launch/scaling.sh [FOLDER]
# How training scales over the devices that are there, in one call: parity and bandwidth, pmean_complex_safe beside the
# mean of as many bytes of float32, weak and strong scaling of ViT-S/16 (beside PyTorch, where torch and timm are) and
# of hgru_bi from cached Pathfinder, memory under --shard, and throughput of predict with the latter. FOLDER (scaling)
# gets a folder or a log for each part, and scaling.md with all tables. PARTS chooses some of "parity means weak memory
# predict strong"; VIT, HGRU and DATA hold the flags of the two models and of the images, PREDICTED the number of images
# predicted, MEAN_MIB the size of the means, STEPS the steps timed, PYTHON the interpreter. What an earlier call finished
# stays.
# Rehearsed on 8 simulated CPU devices, whose throughput means nothing: they share the cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
output=${1:-scaling}
: "${PYTHON:=python}" "${PARTS:=parity means weak memory predict strong}" "${PREDICTED:=4096}" "${STEPS:=20}"
for part in $PARTS; do
    case " parity means weak memory predict strong " in
    *" $part "*) ;;
    *)
        echo "error: no part $part in PARTS, type some of: parity means weak memory predict strong" >&2
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

# A table of `bench`: `table TITLE FOLDER flags`.
table() {
    local title=$1 folder="$output/$2"
    shift 2
    set -- "${data[@]}" --steps "$STEPS" "$@"
    if ! finished "$folder" "$@"; then
        rm -f "$folder/bench.json" "$folder/bench.md" # of a call that was ended
        "$PYTHON" main.py bench "$@" --output "$folder"
        echo "$*" >"$folder/finished_with"
    fi
    printf '\n%s\n\n' "**$title**" >>"$output/scaling.md"
    cat "$folder/bench.md" >>"$output/scaling.md"
}

: >"$output/scaling.md"
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
import jax.numpy as jnp

from parallel.devices import AXIS, per_device, spmd
from parallel.sync import pmean_complex_safe

mib, devices = int(sys.argv[1]), jax.local_devices()
numbers = mib * 2**20 // 4


def seconds(mean, x):
    program = spmd(mean, devices)
    jax.block_until_ready(program(x))
    times = []
    for _ in range(12):
        began = time.perf_counter()
        jax.block_until_ready(program(x))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


real = jnp.ones((len(devices), numbers), jnp.float32)
pair = jax.lax.complex(real[:, : numbers // 2], real[:, : numbers // 2])
plain = seconds(lambda x: jax.lax.pmean(x, AXIS), per_device(jax.device_get(real), devices))
print(f"mean of {mib} MiB over {len(devices)} devices: pmean of float32 {plain * 1e3:.2f} ms")
for name, x in (("float32", real), ("complex64", pair)):
    safe = seconds(pmean_complex_safe, per_device(jax.device_get(x), devices))
    print(f"pmean_complex_safe of {name} {safe * 1e3:.2f} ms, {safe / plain:.3f} times as long")
PY
        ;;
    weak | strong)
        table "ViT, $part scaling" "vit_$part" "${vit[@]}" --devices "$sizes" --scaling "$part" "${peer[@]}"
        table "hgru_bi, $part scaling" "hgru_bi_$part" "${hgru[@]}" --devices "$sizes" --scaling "$part"
        ;;
    memory)
        for shard in none optimizer params; do
            table "hgru_bi, --shard $shard" "shard_$shard" "${hgru[@]}" --devices "$count" --shard "$shard"
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
cat "$output/scaling.md"
echo "tables in $output/scaling.md"
