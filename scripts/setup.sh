#!/usr/bin/env bash
# Makes .venv in the project folder: `bash scripts/setup.sh [dev]`. Safe to call again; does nothing when up to date.
#
#   RLPIPE_PYTHON           interpreter to build the environment from (default: python3.11, python3.12 or python3)
#   RLPIPE_TORCH_INDEX_URL  package index that offers torch's CPU build; tried first when set
#   RLPIPE_COMPILE          compile all packages now, as an image wants it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch_version=2.13.0

find_python() {
  local candidate
  for candidate in ${RLPIPE_PYTHON:-} python3.11 python3.12 python3; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: rlpipe needs Python 3.11 or 3.12 with the venv module; none was found (set RLPIPE_PYTHON)" >&2
  exit 2
}

install_torch() {
  if python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch_version')" 2>/dev/null; then
    return
  fi
  # The CPU build lies in an index of its own or beside the machine's wheels; pip compares it with the hash that its index
  # publishes, if that does. What it depends on is in requirements/cpu.txt.
  if "${install[@]}" --no-deps ${RLPIPE_TORCH_INDEX_URL:+--extra-index-url "$RLPIPE_TORCH_INDEX_URL"} \
    "torch==$torch_version+cpu" 2>/dev/null; then
    return
  fi
  # Some indexes offer only the CUDA build: it works on a CPU too, with the CUDA packages that its metadata names.
  "${install[@]}" --no-deps --require-hashes -r requirements/hashes/cpu_torch.txt
}

lists=(requirements/cpu.txt)
[ "${1:-}" = dev ] && lists+=(requirements/dev.txt)
[ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
install=(pip install -q --disable-pip-version-check)
# Compiling all packages takes minutes and 300 MB. Python compiles and keeps what is imported, where it may; where it may
# not, every process would compile anew, which takes longer than everything else that it does to start.
[ -n "${RLPIPE_COMPILE:-}${PYTHONDONTWRITEBYTECODE:-}" ] || install+=(--no-compile)

for list in "${lists[@]}"; do
  stamp=".venv/.installed-$(basename "$list")"
  hashes="requirements/hashes/$(basename "$list")"
  want=$(cat "$list" "$hashes" pyproject.toml | sha256sum)
  [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && continue
  echo "setup: installing $list into .venv" >&2
  [ "$list" = requirements/cpu.txt ] && install_torch
  "${install[@]}" --no-deps --require-hashes -r "$hashes"
  [ "$list" = requirements/cpu.txt ] && "${install[@]}" --no-deps --no-build-isolation -e .
  echo "$want" >"$stamp"
done
