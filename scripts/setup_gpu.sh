#!/usr/bin/env bash
# Makes .venv with the CUDA 13 environment of requirements/gpu.txt: `bash scripts/setup_gpu.sh`. Safe to call again.
#
#   RLPIPE_PYTHON           interpreter to build the environment from (default: python3.12)
#   RLPIPE_TORCH_INDEX_URL  package index that offers torch's CUDA 13 build
#   RLPIPE_COMPILE          compile all packages now, as an image wants it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch_version=2.11.0
index=${RLPIPE_TORCH_INDEX_URL:-https://download.pytorch.org/whl/cu130}

[ -x .venv/bin/python ] || "${RLPIPE_PYTHON:-python3.12}" -m venv .venv
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
install=(pip install -q --disable-pip-version-check)
[ -n "${RLPIPE_COMPILE:-}${PYTHONDONTWRITEBYTECODE:-}" ] || install+=(--no-compile) # for the reason in setup.sh

stamp=.venv/.installed-gpu.txt
want=$(cat requirements/gpu.txt pyproject.toml | sha256sum)
[ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && exit
# With its dependencies: they are CUDA, cuDNN, NCCL and Triton in the versions it was built with.
"${install[@]}" --extra-index-url "$index" "torch==$torch_version"
"${install[@]}" --no-deps -r requirements/gpu.txt
"${install[@]}" --no-deps --no-build-isolation -e .
echo "$want" >"$stamp"
