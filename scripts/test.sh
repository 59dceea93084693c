#!/usr/bin/env bash
# Sets up what the tests need, then lints, checks types and import directions, and runs the tests.
#
#   bash scripts/test.sh [--slow] [pytest arguments]     --slow: also the tests marked slow or alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
slow=
if [ "${1:-}" = --slow ]; then
  slow=yes
  shift
fi
unset PYTHONDONTWRITEBYTECODE # what is imported is compiled once and kept in .venv
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ruff check .
ruff format --check .
mypy --num-workers 2 || { [ $? -eq 2 ] && mypy; } # 2: where all processors are busy, its workers are given up
lint-imports
bandit --quiet -ll --configfile pyproject.toml --recursive rlpipe actor rollout rewards # docs/security.md
shellcheck scripts/*.sh scripts/slurm.sbatch docker/*.sh tests/launch/*.sh .ci/run
yamllint --strict .
hadolint docker/Dockerfile.cpu docker/Dockerfile.gpu

# One more than processors of the smallest machine: a test waits for something, an engine's start or a time limit, in a
# sixth of its time.
if [ -z "$slow" ]; then
  exec python -m pytest -m "not slow and not alone" --numprocesses 3 --no-loadscope-reorder "$@"
fi
# The second part looks at the whole machine, so it runs when nothing else does. Either may have nothing to run.
empty=0
run_tests() { python -m pytest "$@" || { [ $? -eq 5 ] && empty=$((empty + 1)); }; }
run_tests -m "not alone" --numprocesses 3 --no-loadscope-reorder "$@"
run_tests -m alone "$@"
if [ "$empty" -eq 2 ]; then
  echo "test: no test was selected" >&2
  exit 5
fi
