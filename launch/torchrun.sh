#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Start a script under torchrun, on one node or on several.
#
#   One node, 4 processes:
#       launch/torchrun.sh 4 script.py --its-options
#
#   Two nodes, 8 processes each: run the same line on both nodes, with each node's own NODE_RANK:
#       NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh 8 script.py      (on node0)
#       NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/torchrun.sh 8 script.py      (on the other)
#
# MASTER_ADDR is a name or address of the node with NODE_RANK=0 that all nodes can reach. MASTER_PORT is a port that is
# free there (29500 if unset). Several nodes need a key, with which their ranks authenticate (docs/security.md): make
# one with (umask 077; openssl rand -hex 32 > job.key), put it on all nodes, and set TILESCALE_JOB_KEY_FILE to its path.
#
#   A job that starts again when a rank fails, up to MAX_RESTARTS times: the script continues from its checkpoint.
#   The nodes then find each other at RDZV=HOST:PORT, an address of one of them, and torchrun numbers them:
#       MAX_RESTARTS=3 NNODES=2 RDZV=node0:29500 launch/torchrun.sh 8 script.py    (on both)
#
# Each process runs on the cores and adapters next to its GPU (tilescale bind), each line of output carries its rank.
# After a failure tilescale doctor says what such a job can do.
set -euo pipefail

if [ $# -lt 2 ] || [[ ! $1 =~ ^([1-9][0-9]*|auto|cpu|gpu)$ ]]; then
    echo "usage: [NNODES=.. NODE_RANK=.. MASTER_ADDR=..] [MAX_RESTARTS=.. RDZV=..] $0 PROCESSES_PER_NODE script.py" \
        "[args...]" >&2
    exit 2
fi
processes=$1
shift

options=(--nproc-per-node "$processes" --max-restarts "${MAX_RESTARTS:-0}" --tee 3 --no-python)
if [ -n "${RDZV:-}" ]; then
    options+=(--nnodes "${NNODES:-1}" --rdzv-backend c10d --rdzv-endpoint "$RDZV" --rdzv-id "${RDZV_ID:-tilescale}")
    [ -z "${LOCAL_ADDR:-}" ] || options+=(--local-addr "$LOCAL_ADDR")
elif [ "${NNODES:-1}" -eq 1 ]; then
    options+=(--standalone) # picks a free port, so that several jobs fit on one machine
else
    options+=(
        --nnodes "$NNODES"
        --node-rank "${NODE_RANK:?set NODE_RANK to 0 on the first node, 1 on the next, ...}"
        --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the address of the node with NODE_RANK=0}"
        --master-port "${MASTER_PORT:-29500}"
    )
fi

# Each process would otherwise start as many threads as there are cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# shellcheck disable=SC2016 # torchrun fills it in: the rank, before every line
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[${rank}] '
python=${PYTHON:-python}
start=(torchrun "${options[@]}" "$python" -m tilescale.cli bind "$python")
code=0
"${start[@]}" "$@" || code=$?
case $code in
    0 | 130 | 143) ;; # well, or ended by a person or the scheduler (SIGINT, SIGTERM)
    *)
        echo "tilescale: the job failed with exit code $code; tilescale doctor --job says what such a job can do:" >&2
        TILESCALE_TIMEOUT_S=60 "${start[@]}" -m tilescale.cli doctor --job >&2 || true
        ;;
esac
exit "$code"
