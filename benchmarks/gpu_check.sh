#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# The whole GPU verification on this computer's GPUs in under 8 minutes:   benchmarks/gpu_check.sh [--help]
# NVLink multicast stays off: on shared hosts a program that uses it can take the GPUs of others out of service.
set -euo pipefail
cd "$(dirname "$0")/.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 OMP_NUM_THREADS=2 TILESCALE_WAIT_S=${TILESCALE_WAIT_S:-10}
exec "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"
