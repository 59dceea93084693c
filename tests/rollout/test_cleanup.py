"""What a killed engine leaves goes with the next one; what a living one uses stays."""

import subprocess
import sys

from rollout import cleanup

_OWNER = """
import sys, time
from rollout.cleanup import claim_directory
folder = claim_directory(sys.argv[1])
(folder / "socket").touch()
print(folder, flush=True)
time.sleep(600)
"""


def test_only_folders_of_dead_engines_are_removed():
    owners = {}
    for instance in ("test-cleanup-dead", "test-cleanup-alive"):
        owner = subprocess.Popen([sys.executable, "-c", _OWNER, instance], stdout=subprocess.PIPE, text=True)
        folder = cleanup.engine_directory(instance)
        assert owner.stdout.readline().strip() == str(folder)
        owners[folder] = owner
    dead, alive = owners
    try:
        cleanup.remove_abandoned()
        assert (dead / "socket").exists() and (alive / "socket").exists()
        owners[dead].kill()
        owners[dead].wait()
        cleanup.remove_abandoned()
        assert not dead.exists() and (alive / "socket").exists()
    finally:
        for owner in owners.values():
            owner.kill()
            owner.wait()
        cleanup.remove_abandoned()
    assert not alive.exists()


def test_a_folder_of_somebody_else_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(cleanup, "_TEMPORARY", tmp_path)
    (tmp_path / "rlpipe-engine-without-owner").mkdir()
    cleanup.remove_abandoned()
    assert (tmp_path / "rlpipe-engine-without-owner").is_dir()
