#!/usr/bin/env bash
# Trains on a Ray cluster that runs already. The driver runs here, on one of its nodes; the cluster is left as it was.
#
#   bash scripts/ray_cluster.sh HEAD_HOST:PORT|auto CONFIG [arguments of `rlpipe train`]
#
#   RLPIPE_PROGRAMS   folder of `rlpipe` (default: the checkout's .venv/bin, where there is one)
#   RLPIPE_SETUP      shell lines to run first
set -euo pipefail
programs=${RLPIPE_PROGRAMS:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin}
[ ! -d "$programs" ] || export PATH="$programs:$PATH"
eval "${RLPIPE_SETUP:-}"
address=$1
shift
exec rlpipe train "$@" "ray.address=$address"
