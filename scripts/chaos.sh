#!/usr/bin/env bash
# Disturbs whole runs on schedule and looks at what they made (tests/chaos/), then measures how fast lost engines are
# noticed and healed. Takes more than two hours on two cores, by how busy they are; a busy machine changes no verdict.
#
#   bash scripts/chaos.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE
bash scripts/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python -m pytest tests/chaos --numprocesses 2 --no-loadscope-reorder "$@"
python -m tests.chaos.healing_times
