#!/usr/bin/env bash
# Trains on this machine; Ray starts and ends with the run.
#
#   bash scripts/local.sh CONFIG [arguments of `rlpipe train`]
#
#   RLPIPE_PROGRAMS  folder of `rlpipe` (default: the checkout's .venv/bin, where there is one)
#   RLPIPE_SETUP     shell lines to run first
#   RLPIPE_WARM_UP   1: fill the caches of all compilers first
set -euo pipefail
programs=${RLPIPE_PROGRAMS:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin}
[ ! -d "$programs" ] || export PATH="$programs:$PATH"
eval "${RLPIPE_SETUP:-}"
if [ "${RLPIPE_WARM_UP:-0}" = 1 ]; then
  settings=()
  for argument in "$@"; do
    [[ $argument == --* ]] || settings+=("$argument")
  done
  rlpipe warm-up "${settings[@]}"
fi
exec rlpipe train "$@"
