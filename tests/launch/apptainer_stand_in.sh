#!/usr/bin/env bash
# apptainer exec --pwd=FOLDER [--bind=SOURCE[:TARGET[:ro]]]... IMAGE COMMAND...
#
# For a host without Apptainer: the command in a root of its own, the folder IMAGE, which sees of this machine only the
# system's programs and what is bound. Anything else in the arguments is refused. Each command leaves a line in FOLDER/contained.
set -euo pipefail
[ "$1" = exec ]
shift
mounts=()
while [[ $1 == --* ]]; do
  case $1 in
    --pwd=*) folder=${1#*=} ;;
    --bind=*) mounts+=("${1#*=}") ;;
    *) exit 9 ;;
  esac
  shift
done
image=$1
shift
echo "$*" >>"$folder/contained"
if [ -z "${INSIDE:-}" ]; then
  INSIDE=yes exec unshare --mount bash "$0" exec --pwd="$folder" "${mounts[@]/#/--bind=}" "$image" "$@"
fi
for name in usr bin sbin lib lib64 etc proc dev; do
  mount --rbind "/$name" "$image/$name"
done
mount -t tmpfs none "$image/tmp"
for mount in "${mounts[@]}"; do
  IFS=: read -r source target options <<<"$mount"
  target=$image/${target:-$source}
  mkdir -p "$target"
  mount --bind "$source" "$target"
  [ "$options" != ro ] || mount -o remount,bind,ro "$target"
done
export PATH=/opt/rlpipe/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin
# shellcheck disable=SC2016  # expanded in there
exec chroot "$image" bash -c 'cd "$0" && exec "$@"' "$folder" "$@"
