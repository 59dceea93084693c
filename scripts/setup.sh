#!/usr/bin/env bash
# Makes .venv in the project folder: `bash scripts/setup.sh [cpu|gpu] [dev]`. Safe to call again; does nothing when up to
# date. Without cpu or gpu it takes gpu where there is an NVIDIA GPU with a driver for CUDA 13, or what .venv is already.
#
#   RLPIPE_PYTHON           interpreter to build the environment from (default: python3.12 for gpu; for cpu python3.11,
#                           python3.12 or python3)
#   RLPIPE_TORCH_INDEX_URL  package index that offers torch's CPU build, or another CUDA 13 build; tried first when set
#   RLPIPE_COMPILE          compile all packages now, as an image wants it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cpu_torch_version=2.13.0
gpu_torch_version=2.11.0
oldest_driver=580 # for CUDA 13

driver() { nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1; }

# What is asked for, what .venv is, or what the machine has.
choose_device() {
  local found
  if [ -n "$1" ]; then
    echo "$1"
  elif [ -f .venv/.installed-gpu.txt ] || [ -f .venv/.installed-cpu.txt ]; then
    if [ -f .venv/.installed-gpu.txt ]; then echo gpu; else echo cpu; fi
  elif found=$(driver) && [[ $found =~ ^[0-9] ]]; then
    if [ "${found%%.*}" -ge "$oldest_driver" ]; then
      echo gpu
    else
      echo "setup: driver $found is older than $oldest_driver, which CUDA 13 needs: setting up for the CPU" >&2
      echo cpu
    fi
  else
    echo cpu
  fi
}

find_python() {
  local candidate versions="3.11 3.12" candidates=(python3.11 python3.12 python3)
  [ "$device" = cpu ] || versions=3.12 candidates=(python3.12 python3)
  for candidate in ${RLPIPE_PYTHON:-} "${candidates[@]}"; do
    if "$candidate" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] not in '$versions'.split())" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: the ${device^^} environment needs Python ${versions/ / or } with the venv module; none was found (set RLPIPE_PYTHON)" >&2
  exit 2
}

has_torch() { python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$1')" 2>/dev/null; }

install_torch_cpu() {
  # The CPU build lies in an index of its own or beside the machine's wheels; pip compares it with the hash that its index
  # publishes, if that does. What it depends on is in requirements/cpu.txt.
  if "${install[@]}" --no-deps ${RLPIPE_TORCH_INDEX_URL:+--extra-index-url "$RLPIPE_TORCH_INDEX_URL"} \
    "torch==$cpu_torch_version+cpu" 2>/dev/null; then
    return
  fi
  # Some indexes offer only the CUDA build: it works on a CPU too, with the CUDA packages that its metadata names.
  echo "setup: no CPU build of torch $cpu_torch_version here: taking the CUDA build, 4 GB more (RLPIPE_TORCH_INDEX_URL names an index with CPU builds)" >&2
  "${install[@]}" --no-deps --require-hashes -r requirements/hashes/cpu_torch.txt
}

install_torch_gpu() {
  # With CUDA, cuDNN, NCCL and Triton in the versions it was built with; from another index without our hashes.
  if [ -n "${RLPIPE_TORCH_INDEX_URL:-}" ]; then
    "${install[@]}" --extra-index-url "$RLPIPE_TORCH_INDEX_URL" "torch==$gpu_torch_version"
  else
    "${install[@]}" --no-deps --require-hashes -r requirements/hashes/gpu_torch.txt
  fi
}

asked=''
dev=''
for argument in "$@"; do
  case $argument in
    cpu | gpu) asked=$argument ;;
    dev) dev=yes ;;
    *)
      echo "usage: bash scripts/setup.sh [cpu|gpu] [dev]" >&2
      exit 2
      ;;
  esac
done
device=$(choose_device "$asked")
other=cpu
[ "$device" = gpu ] || other=gpu
if [ -f ".venv/.installed-$other.txt" ]; then
  echo "setup: .venv was made for the $other: remove it, then run this again" >&2
  exit 2
fi

if [ ! -x .venv/bin/python ]; then
  python=$(find_python)
  "$python" -m venv .venv
fi
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
install=(pip install -q --disable-pip-version-check)
# Compiling all packages takes minutes and 300 MB. Python compiles and keeps what is imported, where it may; where it may
# not, every process would compile anew, which takes longer than everything else that it does to start.
[ -n "${RLPIPE_COMPILE:-}${PYTHONDONTWRITEBYTECODE:-}" ] || install+=(--no-compile)

for list in "$device" ${dev:+dev}; do
  stamp=".venv/.installed-$list.txt"
  # Each file by its own hash, sorted as bytes: the order of a pattern's files depends on the language of the machine.
  want=$(sha256sum "requirements/$list.txt" "requirements/hashes/$list"*.txt pyproject.toml setup.py | LC_ALL=C sort | sha256sum)
  [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && continue
  echo "setup: installing requirements/$list.txt into .venv" >&2
  torch_version="${list}_torch_version"
  if [ "$list" = "$device" ] && ! has_torch "${!torch_version}"; then
    "install_torch_$device"
  fi
  "${install[@]}" --no-deps --require-hashes -r "requirements/hashes/$list.txt"
  [ "$list" != "$device" ] || "${install[@]}" --no-deps --no-build-isolation -e .
  echo "$want" >"$stamp"
done
