#!/usr/bin/env bash
# Makes .venv with the CUDA 13 environment of requirements/gpu.txt: `bash scripts/setup_gpu.sh`. Safe to call again.
#
#   RLPIPE_PYTHON           interpreter to build the environment from (default: python3.12)
#   RLPIPE_TORCH_INDEX_URL  package index that offers another CUDA 13 build of torch; it is taken without our hashes
#   RLPIPE_COMPILE          compile all packages now, as an image wants it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch_version=2.11.0

[ -x .venv/bin/python ] || "${RLPIPE_PYTHON:-python3.12}" -m venv .venv
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
install=(pip install -q --disable-pip-version-check)
[ -n "${RLPIPE_COMPILE:-}${PYTHONDONTWRITEBYTECODE:-}" ] || install+=(--no-compile) # for the reason in setup.sh

stamp=.venv/.installed-gpu.txt
want=$(cat requirements/gpu.txt requirements/hashes/gpu*.txt pyproject.toml | sha256sum)
[ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && exit
# With CUDA, cuDNN, NCCL and Triton in the versions it was built with.
if [ -n "${RLPIPE_TORCH_INDEX_URL:-}" ]; then
  "${install[@]}" --extra-index-url "$RLPIPE_TORCH_INDEX_URL" "torch==$torch_version"
else
  "${install[@]}" --no-deps --require-hashes -r requirements/hashes/gpu_torch.txt
fi
"${install[@]}" --no-deps --require-hashes -r requirements/hashes/gpu.txt
"${install[@]}" --no-deps --no-build-isolation -e .
echo "$want" >"$stamp"
