#!/usr/bin/env bash
# Sets up what the tests need, then lints, checks types and import directions, and runs the tests.
#
#   bash scripts/test.sh [--slow] [pytest arguments]     --slow: also the tests marked slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
selection=(-m "not slow")
if [ "${1:-}" = --slow ]; then
  selection=()
  shift
fi
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ruff check .
ruff format --check .
mypy
lint-imports
shellcheck scripts/*.sh scripts/slurm.sbatch .ci/run
yamllint --strict .
python -m pytest "${selection[@]}" "$@"
