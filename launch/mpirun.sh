#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Start a script under mpirun.
#
#   One node, 4 processes:
#       launch/mpirun.sh 4 script.py --its-options
#
#   Several nodes: name them in a host file, one per line.
#       HOSTFILE=hosts.txt launch/mpirun.sh 16 script.py
#
#   Rank 0 runs on the first of them. The others find the network that leads to it, unless MASTER_ADDR names an address
#   of it on another one.
#
# The script runs in the Python that `python` finds, with the mpi4py of that Python. mpirun must belong to the MPI library
# that mpi4py loads. Without an MPI on the machine, this is enough, as an ordinary user:
#       pip install mpi4py mpich
# MPI brings the processes together and does nothing else: a CUDA-aware MPI is not needed. Each process runs on the cores
# and adapters next to its GPU (tilescale bind), each line of output carries its rank. After a failure tilescale doctor
# says what such a job can do, and the exit code is that of the script.
set -euo pipefail

if [ $# -lt 2 ] || [[ ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: [HOSTFILE=..] $0 PROCESSES script.py [args...]" >&2
    exit 2
fi
processes=$1
shift

# Each process would otherwise start as many threads as there are cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
if [ -n "${HOSTFILE:-}" ] && [ -z "${MASTER_ADDR:-}" ]; then
    # The first line that is not a comment, up to a number of ranks: "node0:8", "node0 slots=8".
    MASTER_ADDR=$(sed -E '/^[[:space:]]*(#|$)/d; s/^[[:space:]]*([^[:space:]:]+).*/\1/; q' "$HOSTFILE")
    export MASTER_ADDR
fi

# MPICH and Open MPI differ in the options below; both know -n. Binding is left to tilescale bind, which knows the GPUs.
options=()
if mpirun --version 2>&1 | grep -q -e "Open MPI" -e "PRRTE"; then
    # Where Python has an MPICH too (pip install mpich), mpi4py needs the name of the MPI that started it.
    export MPI4PY_MPIABI=${MPI4PY_MPIABI:-openmpi}
    # More processes than cores is normal for emulated runs, and Open MPI refuses it without an option.
    options+=(--map-by :OVERSUBSCRIBE --bind-to none --tag-output)
    [ -z "${HOSTFILE:-}" ] || options+=(--hostfile "$HOSTFILE")
    # Other hosts get of the environment only what is named here; values never appear on a command line.
    families='TILESCALE|TILELANG|NCCL|NVSHMEM|UCX|GLOO|CUDA|OMP|TORCH|MPI4PY'
    for name in $(compgen -e | grep -E "^($families)_|^(PATH|LD_LIBRARY_PATH|PYTHON.*|MASTER_ADDR)\$"); do
        options+=(-x "$name")
    done
else
    options+=(-prepend-rank)
    [ -z "${HOSTFILE:-}" ] || options+=(-f "$HOSTFILE")
fi

# MPICH leaves the shared memory of ranks that were killed: 2 MiB each, until the host is started again.
forget_left_memory() {
    for file in $(find /dev/shm -maxdepth 1 -name 'mpich_shm_*' -user "$(id -u)" ! -newermt '2 seconds ago' 2>/dev/null); do
        grep -qsF "$file" /proc/[0-9]*/maps || rm -f "$file"
    done
}
trap forget_left_memory EXIT

python=${PYTHON:-python}
start=(mpirun ${options[@]+"${options[@]}"} -n "$processes" "$python" -m tilescale.cli bind "$python")
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
