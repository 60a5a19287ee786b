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
# free there (29500 if unset). Several nodes need a key, with which their ranks know each other (docs/security.md): make
# one with (umask 077; openssl rand -hex 32 > job.key), put it on all nodes, and set TILESCALE_JOB_KEY_FILE to its path.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: [NNODES=.. NODE_RANK=.. MASTER_ADDR=..] $0 PROCESSES_PER_NODE script.py [args...]" >&2
    exit 2
fi
processes=$1
shift

if [ "${NNODES:-1}" -eq 1 ]; then
    # --standalone picks a free port, so that several jobs fit on one machine.
    exec torchrun --standalone --nproc-per-node "$processes" "$@"
fi

exec torchrun \
    --nnodes "$NNODES" \
    --node-rank "${NODE_RANK:?set NODE_RANK to 0 on the first node, 1 on the next, ...}" \
    --nproc-per-node "$processes" \
    --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the address of the node with NODE_RANK=0}" \
    --master-port "${MASTER_PORT:-29500}" \
    "$@"
