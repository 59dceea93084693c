"""scripts/ray_node.sh keeps the logs of its node, however often it is told to end."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rlpipe.shared.project_files import ROOT

# In the place of Ray. Its first start ends by itself, as when a raylet takes too long.
RAY = """#!/usr/bin/env bash
for word in "$@"; do case $word in --temp-dir=*) folder=${word#*=} ;; esac; done
start=$(find "$folder" -name "session_[0-9]*" | wc -l)
mkdir -p "$folder/session_$start/logs"
ln -sfn "$folder/session_$start" "$folder/session_latest"
echo "start $start" >"$folder/session_$start/logs/raylet.out"
[ "$start" -gt 0 ] || exit 1
for file in $(seq 200); do head -c 100000 /dev/zero >"$folder/session_$start/logs/$file.log"; done
trap 'ended=yes' TERM
echo "$folder" >"$STARTED"
until [ -n "${ended:-}" ]; do sleep 0.05; done
echo "to its end" >>"$folder/session_$start/logs/raylet.out"
"""
DEADLINE_SECONDS = 60


@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("pause_seconds", [0.0, 0.01, 0.1])
def test_a_node_that_is_told_to_end_again_and_again_keeps_all_its_logs(tmp_path, pause_seconds, slow):
    """By signals to all its processes, as Slurm sends them."""
    ray = tmp_path / "ray"
    ray.write_text(RAY)
    ray.chmod(0o755)
    environment = {**os.environ, "RLPIPE_PROGRAMS": str(tmp_path), "RLPIPE_NODE_ADDRESS": "127.0.0.1"}
    started = tmp_path / "started"
    environment |= {"RLPIPE_LOGS": str(tmp_path / "logs"), "STARTED": str(started)}
    script = ROOT / "scripts/ray_node.sh"
    if slow:  # as on a busy machine, so that signals come between what decides what signals do
        text = re.sub(r'^( *)(trap |exit "\$code")', r"\1sleep 0.02; \2", script.read_text(), flags=re.MULTILINE)
        assert text.count("sleep 0.02") >= 5
        script = tmp_path / "slow_ray_node.sh"
        script.write_text(text)
    command = ["bash", str(script), "join", "127.0.0.1:6379"]
    with (tmp_path / "output").open("w") as output:
        node = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    _wait_for(lambda: started.exists() and started.read_text())
    _wait_for(lambda: _told(node, pause_seconds))
    # 0: on a busy machine ray has ended, told first, before the script is told.
    assert node.returncode in (143, 0), (tmp_path / "output").read_text()
    kept = tmp_path / "logs" / "127.0.0.1"
    assert (kept / "raylet.out").read_text() == "start 1\nto its end\n"
    assert [(kept / f"{file}.log").stat().st_size for file in range(1, 201)] == [100_000] * 200
    assert (kept / "attempt-1" / "raylet.out").read_text() == "start 0\n"
    assert not Path(started.read_text().strip()).exists()


def _told(node: subprocess.Popen[bytes], pause_seconds: float) -> bool:
    """Whether it has ended, after one more signal to each of its processes."""
    try:
        tree = psutil.Process(node.pid)
        for process in [*tree.children(recursive=True), tree]:
            process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        pass
    time.sleep(pause_seconds)
    return node.poll() is not None


def _wait_for(condition) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
