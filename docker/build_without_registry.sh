#!/usr/bin/env bash
# Builds the CPU image by its Dockerfile where no registry of images can be reached, then runs a command in it: every
# instruction is executed, in a clean root whose base image is made of Debian's packages.
#
#   bash docker/build_without_registry.sh [COMMAND...]     default: health
#
#   RLPIPE_BUILD_FOLDER   room for images, 20 GB (default: /var/tmp/rlpipe-images)
#   RLPIPE_BUILD_MOUNTS   folders of this machine that the build sees, for instance /etc/xdg/pip and a local package index
#   RLPIPE_TORCH_INDEX_URL   as for scripts/setup.sh; without CPU builds of torch the image holds CUDA's, 4 GB more
#
# Needs root and the packages buildah and debootstrap.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${RLPIPE_BUILD_FOLDER:-/var/tmp/rlpipe-images}
base=python:3.11-slim-bookworm
mkdir -p "$folder"
buildah=(buildah --root "$folder/images" --runroot "$folder/run" --storage-driver overlay)

if ! "${buildah[@]}" inspect --type image "docker.io/library/$base" >/dev/null 2>&1; then
  root=$(mktemp -d "$folder/base-XXXXXX")
  # debootstrap does not find what provides the virtual package python3.11-distutils.
  debootstrap --variant=minbase --include=ca-certificates,python3.11,python3.11-venv,python3-distutils bookworm "$root" >&2
  new=$("${buildah[@]}" from scratch)
  "${buildah[@]}" add --quiet "$new" "$root" / >/dev/null
  "${buildah[@]}" commit --quiet "$new" "docker.io/library/$base" >/dev/null
  "${buildah[@]}" rm "$new" >/dev/null
  rm -rf "$root"
fi

mounts=()
for mount in ${RLPIPE_BUILD_MOUNTS:-}; do
  mounts+=(--volume "$mount:$mount:ro")
done
"${buildah[@]}" build --format docker --isolation chroot --layers --pull=never "${mounts[@]}" \
  --build-arg "TORCH_INDEX_URL=${RLPIPE_TORCH_INDEX_URL:-}" --file docker/Dockerfile.cpu --tag rlpipe:cpu . >&2

container=$("${buildah[@]}" from --pull=never localhost/rlpipe:cpu)
trap '"${buildah[@]}" rm "$container" >/dev/null' EXIT
[ "$#" -gt 0 ] || set -- health
"${buildah[@]}" run --isolation chroot "$container" -- rlpipe "$@"
