#!/usr/bin/env bash
# Sets everything up, runs the suites of tests/gpu that one GPU suffices for, and records each that passes
# (benchmarks/record.py).
#
#   bash scripts/test_gpu.sh [FOLDER]     FOLDER: for what each suite prints; without it gpu_tests/ below the project
#
# Starting and compiling is most of their time, so suites run beside each other where memory allows; those that count
# memory or want all of it run alone. The exit code is 1 when one did not pass.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
nvidia-smi --list-gpus >/dev/null || { echo "test_gpu: no GPU is seen" >&2; exit 2; }
unset PYTHONDONTWRITEBYTECODE
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
logs=$(realpath -m "${1:-gpu_tests}")
mkdir -p "$logs"
rm -f "$logs"/failed
record() { # one after the other
  local name began
  for name in "$@"; do
    began=$SECONDS
    if python benchmarks/record.py "$name" >"$logs/$name.log" 2>&1; then
      echo "$name passed after $((SECONDS - began)) seconds"
    else
      echo "$name did not pass after $((SECONDS - began)) seconds: $logs/$name.log" | tee -a "$logs/failed"
    fi
  done
}
record gpu_engines jit_hooks &
record gpu_kernels gpu_fused_functions gpu_chaos &
record gpu_adapters gpu_runs &
record gpu_drafts &
wait
record gpu_sharing gpu_memory gpu_layer_gradients
python benchmarks/record.py # suites beside each other render the page from what was there then
[ ! -e "$logs/failed" ]
