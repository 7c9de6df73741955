#!/usr/bin/env bash
# bash configs/launch/torchrun.sh --config configs/gpus2.yaml
# One process for each GPU of this node, started by torchrun (from any PyTorch; nothing else of it is used). On several
# nodes: the same line on each, with NNODES, NODE_RANK and MASTER_ADDR (the host of node 0) set. NPROC=2 takes two
# processes. Without PyTorch, on one node: python main.py --nproc_per_node auto does the same.
# Not run with torchrun; a test runs it with a stand-in.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec torchrun --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --nproc_per_node="${NPROC:-gpu}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${MASTER_PORT:-29400}" main.py "$@"
