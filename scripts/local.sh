#!/usr/bin/env bash
# Trains on this machine; Ray starts and ends with the run.
#
#   bash scripts/local.sh CONFIG [arguments of `rlpipe train`]
#
#   RLPIPE_SETUP   shell lines to run first
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ ! -d .venv/bin ] || export PATH="$PWD/.venv/bin:$PATH"
eval "${RLPIPE_SETUP:-}"
exec rlpipe train "$@"
