#!/usr/bin/env bash
# bash configs/launch/compare_cells.sh FOLDER [FLAGS]
# What each cell costs and reaches: trains one after the other, on Pathfinder (easy) for 500 steps or as FLAGS say, each
# into FOLDER under its name, and prints them side by side. Started again it goes on with what is not complete. CELLS
# holds the cells (all; times are told relative to the first), LIMIT the seconds that each may take, PYTHON the
# interpreter. Run on 2 CPU cores and on one H100: docs/benchmarks.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ $# -eq 0 ] || [[ $1 == -* ]]; then
    echo "type: bash configs/launch/compare_cells.sh FOLDER [FLAGS]" >&2
    exit 2
fi
folder=$1
shift
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
mkdir -p "$folder"
if [ -f "$folder/flags" ] && [ "$(cat "$folder/flags")" != "$*" ]; then
    echo "$folder was begun with the flags '$(cat "$folder/flags")': type the same, or another folder" >&2
    exit 2
fi
echo "$*" >"$folder/flags"
names='from cssm.config import CELLS_NAMES as names; print(*sorted(names, key=lambda name: name != "gated"))'
read -ra cells <<<"${CELLS:-$("$PYTHON" -c "$names")}"

runs=()
for cell in "${cells[@]}"; do
    run=$folder/$cell
    runs+=("$run")
    if grep -qs '"event": "summary"' "$run/metrics.jsonl"; then
        continue
    fi
    flags=(--checkpoint_dir "$folder" --run_name "$cell" --resume auto --cssm "$cell")
    flags+=(--dataset pathfinder --max_steps 500 "$@")
    echo "main.py ${flags[*]}"
    code=0
    ${LIMIT:+timeout --foreground --preserve-status "$LIMIT"} "$PYTHON" main.py "${flags[@]}" --headless >/dev/null ||
        code=$?
    # 5: its loss was not finite, which the table tells; 143: stopped at the limit, with everything saved.
    case $code in 0 | 5 | 143) ;; *) exit "$code" ;; esac
done
"$PYTHON" main.py compare "${runs[@]}"
