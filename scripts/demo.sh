#!/usr/bin/env bash
# Sets everything up and trains the demo: a tiny policy learns to add, on two CPU cores.
#
#   bash scripts/demo.sh [key=value ...]      for instance seed=1; any option of `rlpipe train` works too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # what is imported is compiled once and kept in .venv
bash scripts/setup.sh
exec .venv/bin/rlpipe train configs/demo/arithmetic.yaml --overwrite "$@"
