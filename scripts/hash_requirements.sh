#!/usr/bin/env bash
# Writes requirements/hashes: for each pin of requirements/*.txt the hashes of all files of that release, as the package
# index publishes them, and for torch those of its CUDA build. Needs `uv`; run it after a pin has changed.
#
#   bash scripts/hash_requirements.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
compile=(uv pip compile --quiet --generate-hashes --no-header --no-annotate)

for list in cpu dev gpu; do
  python=3.11
  [ "$list" != gpu ] || python=3.12
  "${compile[@]}" --no-deps --python-version "$python" "requirements/$list.txt" \
    --output-file "requirements/hashes/$list.txt" >/dev/null
done

# torch with the CUDA packages that its metadata names; what the lists pin comes from the lists.
hash_torch() {
  local list=$1 python=$2 version
  version=$(sed -n "s/^${list}_torch_version=//p" scripts/setup.sh)
  echo "torch==$version" |
    "${compile[@]}" --python-version "$python" --universal - |
    awk '/^[^ ]/ { keep = /^(torch|triton|cuda-|nvidia-)/ } keep' >"requirements/hashes/${list}_torch.txt"
}
hash_torch cpu 3.11
hash_torch gpu 3.12
