#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Measure a whole server of GPUs in under 9 minutes:   benchmarks/node.sh [FOLDER]
#
# Wires, flags and launches (tilescale calibrate), wires under load, collectives over sizes, operators compared with cuBLAS,
# NCCL and PyTorch's symmetric memory, the white paper's programs, and simulated times for all of them; results and
# pictures go to FOLDER, by default one for the number of GPUs under benchmarks/results. A part that runs out of its
# time keeps the rows that it has.
# NVLink multicast stays off: on shared hosts a program that uses it can take the GPUs of others out of service.
set -uo pipefail
cd "$(dirname "$0")/.."
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then sed -n '3,9s/^# \{0,1\}//p' "$0"; exit 0; fi
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
if ((gpus == 0)); then echo "node.sh: nvidia-smi lists no GPU here" >&2; exit 69; fi
folder=${1:-benchmarks/results/node-$gpus}
mkdir -p "$folder"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
python=${PYTHON:-python3}
ranks=("$python" -m torch.distributed.run --standalone "--nproc-per-node=$gpus")
missed=()

part() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 begin=$SECONDS
  shift 2
  if timeout --kill-after 5 "$seconds" "$@" >"$folder/$name.log" 2>&1; then
    echo "$name: $((SECONDS - begin)) s"
  else
    echo "$name: ended after $((SECONDS - begin)) s with code $?, see $folder/$name.log"
    missed+=("$name")
  fi
}

part calibrate 90 "$python" -m tilescale.cli calibrate --limit 70 --out "$folder/calibration.json"
part wires 30 "${ranks[@]}" benchmarks/wires.py --rounds 6 --no-beforehand --out "$folder"
part collectives 100 "${ranks[@]}" benchmarks/collectives.py --rounds 6 --out "$folder"
part operators 150 "${ranks[@]}" benchmarks/operators.py --only 'ag_gemm|gemm_rs|gemm_ar|experts' --rounds 6 --out "$folder"
part white_paper 70 "${ranks[@]}" benchmarks/white_paper.py
for name in collectives operators; do
  drawing=$([[ $name == collectives ]] && echo curves || echo chart)
  [[ -e "$folder/$name.json" ]] &&
    part "$name picture" 15 "$python" "benchmarks/$drawing.py" "$name" --file "$folder/$name.json" --to "$folder/$name.svg"
done
part predictions 55 "$python" benchmarks/beside.py "$folder" --limit 45
if ((${#missed[@]})); then echo "not whole: ${missed[*]}"; exit 1; fi
