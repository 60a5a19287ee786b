#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Start a script under Slurm: one task is one rank. Submit it with the shape of the job:
#
#       sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 launch/slurm.sh script.py --its-options
#
# srun starts the tasks, and each sets the variables that torchrun would set; nothing else is needed on the nodes. With
# MPI=pmix (or pmi2) in the environment MPI brings the tasks together instead, if Slurm and the MPI that mpi4py loads are
# built for it. Nodes need the same Python at the same path: PYTHON, or what `python` finds.
#
# After a failure tilescale doctor says what such a job can do, and the exit code is that of the script.
#
#SBATCH --job-name=tilescale
#SBATCH --output=%x-%j.out
set -euo pipefail

if [ $# -lt 1 ] || [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "usage: sbatch --nodes N --ntasks-per-node P $0 script.py [args...]" >&2
    exit 2
fi

# The rendezvous of all ranks is on the first node of the job. The port follows from the job number, so that jobs which share a node
# use different ones; it lies below those that Linux gives to outgoing connections (32768 and up).
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# The key of the job, with which its ranks authenticate (docs/security.md). Slurm hands on the environment.
if [ -z "${TILESCALE_JOB_KEY:-}${TILESCALE_JOB_KEY_FILE:-}" ]; then
    TILESCALE_JOB_KEY=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
    export TILESCALE_JOB_KEY
fi

# Each line of output carries its task, and each task runs on the cores and adapters next to its GPU (tilescale bind). A
# task's error reaches the others within a moment. --kill-on-bad-exit ends those that do not stop by themselves; a task
# that has failed stays until they have, as srun reports those that it ends before those that fail.
python=${PYTHON:-python}
start=(srun --label --kill-on-bad-exit=1 --cpu-bind=none)
if [ -n "${MPI:-}" ]; then
    start+=(--mpi="$MPI" "$python" -m tilescale.cli bind "$python")
else
    # The quoted part runs once in every task: variables such as SLURM_PROCID differ between tasks.
    # shellcheck disable=SC2016
    start+=(bash -c '
        export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID
        code=0
        "$0" -m tilescale.cli bind "$0" "$@" || code=$?
        if [ $code -ne 0 ]; then
            trap "exit $code" TERM
            sleep 15 &
            wait
        fi
        exit $code
    ' "$python")
fi
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
