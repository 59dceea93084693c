#!/usr/bin/env bash
# Sets everything up and runs one of benchmarks/.
#
#   bash scripts/benchmark.sh parity [arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
name=$1
shift
exec python "benchmarks/$name.py" "$@"
