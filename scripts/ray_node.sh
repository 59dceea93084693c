#!/usr/bin/env bash
# This node of a Ray cluster, for as long as the script runs. The node whose address HEAD_HOST is becomes the head.
#
#   bash scripts/ray_node.sh join HEAD_HOST:PORT
#   bash scripts/ray_node.sh address               print this node's address
#   bash scripts/ray_node.sh wait HEAD_HOST:PORT   until the head answers
#
#   RLPIPE_PROGRAMS          folder of `ray` (default: the checkout's .venv/bin, where there is one)
#   RLPIPE_SETUP             shell lines to run first
#   RLPIPE_NODE_ADDRESS      this node's address, where the first address of its host name is not the one
#   RLPIPE_NODE_CPUS, _GPUS  what Ray may use here (default: what it finds)
#   RLPIPE_NODE_OBJECT_STORE_BYTES
#   RLPIPE_LOGS              folder that gets the logs of this node's processes at the end
#   RAY_AUTH_MODE=token, RAY_AUTH_TOKEN   the same on all nodes and for the driver; Ray asks for it
#   RLPIPE_START_SECONDS     how long to wait for the head (default 300)
set -euo pipefail
programs=${RLPIPE_PROGRAMS:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin}
[ ! -d "$programs" ] || export PATH="$programs:$PATH"
eval "${RLPIPE_SETUP:-}"

own_address() {
  if [ -n "${RLPIPE_NODE_ADDRESS:-}" ]; then
    echo "$RLPIPE_NODE_ADDRESS"
  elif [ -n "${NCCL_SOCKET_IFNAME:-}" ]; then
    ip -4 -oneline address show dev "$NCCL_SOCKET_IFNAME" | awk '{ split($4, parts, "/"); print parts[1]; exit }'
  else
    hostname --ip-address | awk '{ print $1 }'
  fi
}

wait_for_head() {
  local end=$((SECONDS + ${RLPIPE_START_SECONDS:-300}))
  until (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; do
    if [ "$SECONDS" -ge "$end" ]; then
      echo "ray_node: no Ray head answers at $1:$2" >&2
      exit 1
    fi
    sleep 1
  done
}

# shellcheck disable=SC2329  # called by traps
finish() {
  # Told again while it copies, it would leave the logs behind; so would cp, which takes this over.
  trap '' TERM INT
  trap - EXIT
  if [ -n "$raylet" ]; then
    kill -TERM "$raylet" 2>/dev/null || true
    wait "$raylet" || true
  fi
  keep_logs "$address"
  rm -rf "$folder"
}

# keep_logs FOLDER: those of the last start, below RLPIPE_LOGS
keep_logs() {
  if [ -n "${RLPIPE_LOGS:-}" ] && [ -d "$folder/session_latest/logs" ]; then
    mkdir -p "$RLPIPE_LOGS/$1"
    cp -r "$folder"/session_latest/logs/. "$RLPIPE_LOGS/$1/" || true
  fi
}

address=$(own_address)
case ${1:-} in
  address)
    echo "$address"
    exit
    ;;
  wait)
    wait_for_head "${2%:*}" "${2##*:}"
    exit
    ;;
  join) ;;
  *)
    echo "usage: bash scripts/ray_node.sh join HEAD_HOST:PORT | wait HEAD_HOST:PORT | address" >&2
    exit 2
    ;;
esac
host=${2%:*}
port=${2##*:}

# A node ends when its driver has ended, so there is nothing for which Ray would have to wait.
export RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
# Short, because names of Unix sockets lie below it.
folder=$(mktemp -d /tmp/rlpipe-ray-XXXXXX)
options=(--node-ip-address="$address" --temp-dir="$folder" --block)
[ -z "${RLPIPE_NODE_CPUS:-}" ] || options+=(--num-cpus="$RLPIPE_NODE_CPUS")
[ -z "${RLPIPE_NODE_GPUS:-}" ] || options+=(--num-gpus="$RLPIPE_NODE_GPUS")
[ -z "${RLPIPE_NODE_OBJECT_STORE_BYTES:-}" ] || options+=(--object-store-memory="$RLPIPE_NODE_OBJECT_STORE_BYTES")
if [ "$address" = "$host" ]; then
  options+=(--head --port="$port" --include-dashboard=false)
else
  wait_for_head "$host" "$port"
  options+=(--address="$host:$port")
fi
raylet=
trap finish EXIT
# Deaf before `finish` begins: an exit in the middle of it would be the end.
trap "trap '' TERM INT; exit 143" TERM INT
# On a busy host a raylet may take longer to start than the 30 seconds that Ray gives it.
for attempt in 1 2 3; do
  began=$SECONDS
  code=0
  ray start "${options[@]}" &
  raylet=$!
  wait "$raylet" || code=$?
  raylet=
  if [ "$code" -eq 0 ] || [ $((SECONDS - began)) -gt 120 ]; then
    break
  fi
  echo "ray_node: ray ended with exit code $code, attempt $attempt of 3" >&2
  keep_logs "$address/attempt-$attempt"
done
trap '' TERM INT
exit "$code"
