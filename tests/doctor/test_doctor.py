"""`rlpipe doctor`: what it finds on this machine, and that it finds what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.commands.doctor.check import Status
from rlpipe.commands.doctor.machine import check_machine
from rlpipe.commands.doctor.packages import TORCH, check_packages, read_pins
from rlpipe.commands.doctor.run_checks import check_run
from rlpipe.config.load import load_config
from rlpipe.shared.checkpoint_folder import checkpoint_path, partial_path, publish

PROJECT = Path(__file__).parents[2]
DEMO = PROJECT / "configs/demo/arithmetic.yaml"


def _places(folder: Path) -> list[str]:
    return [f"run.directory={folder}", f"model.path={folder}/policy", f"prepare.directory={folder}/task"]


def test_pins_of_both_devices_can_be_read_and_name_what_must_be_exact():
    for name in ("cpu.txt", "gpu.txt"):
        assert {"sglang", "megatron-core", "transformers", "ray"} <= set(read_pins(PROJECT / "requirements" / name))
    for device, version in TORCH.items():
        assert f"\n{device}_torch_version={version}\n" in (PROJECT / "scripts/setup.sh").read_text()


@pytest.mark.parametrize(
    ("pins", "status", "words"),
    [
        ({"sglang": "0.0.1"}, Status.FAIL, "but 0.0.1 is needed"),
        ({"no-such-package-here": "1"}, Status.FAIL, "no-such-package-here missing"),
        ({"pyyaml": "0.1"}, Status.WARN, "pyyaml 6"),
    ],
)
def test_another_version_is_told(pins, status, words):
    worst = next(check for check in check_packages(pins) if check.status is not Status.OK)
    assert (worst.status, words in worst.found, bool(worst.fix)) == (status, True, True)


def test_a_machine_that_runs_tests_has_no_failure(tmp_path):
    checks = {check.name: check for check in check_machine(tmp_path)}
    assert checks["ports"].status is Status.OK
    assert checks["disk"].status is not Status.FAIL
    assert all(check.fix for check in checks.values() if check.status is not Status.OK)


@pytest.mark.parametrize("probe", ["gpu", pytest.param("gdn auto", marks=pytest.mark.slow), "all_reduce"])
def test_devices_and_collectives_are_really_tried(probe):
    command = [sys.executable, "-m", "rlpipe.commands.doctor.device_probe", *probe.split()]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert '"found"' in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_backend_that_is_not_there_fails_with_its_reason():
    import torch

    if torch.cuda.is_available():
        pytest.skip("fla may work here")
    command = [sys.executable, "-m", "rlpipe.commands.doctor.device_probe", "gdn", "fla"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "needs CUDA" in done.stderr.splitlines()[-1]


def test_a_broken_checkpoint_and_missing_data_are_told(tmp_path):
    overrides = _places(tmp_path)
    broken = tmp_path / "arithmetic-seed0" / "checkpoints" / "iteration_00000001"
    broken.mkdir(parents=True)
    (broken / "state.json").write_text("{")
    config = load_config(DEMO, [*overrides, f"data.train=[{{name: a, path: {tmp_path}/no.jsonl}}]"])
    checks = {check.name: check for check in check_run(config, DEMO, overrides, quick=True)}
    assert checks["checkpoint"].status is Status.FAIL and "state.json is damaged" in checks["checkpoint"].found
    assert checks["model, data, graders"].status is Status.FAIL and "no.jsonl" in checks["model, data, graders"].found


def _write_checkpoint(directory: Path, iteration: int) -> Path:
    final = checkpoint_path(directory, iteration)
    partial = partial_path(final)
    partial.mkdir(parents=True)
    (partial / "policy.bin").write_bytes(bytes(range(256)) * 40)
    publish(partial, final, {"iteration": iteration}, keep=2)
    return final


@pytest.mark.parametrize(
    ("damage", "status", "words"),
    [
        (lambda file: None, Status.OK, "1 files, 0.00 GB, all as written"),
        (lambda file: file.write_bytes(bytes(256 * 40)), Status.FAIL, "the content of policy.bin is not what was"),
        (lambda file: file.write_bytes(b"short"), Status.FAIL, "has 5 bytes instead of 10240"),
        (lambda file: file.unlink(), Status.FAIL, "is missing"),
    ],
    ids=["whole", "other bytes", "cut", "gone"],
)
def test_files_of_the_newest_checkpoint_are_read(tmp_path, damage, status, words):
    overrides = _places(tmp_path)
    newest = _write_checkpoint(tmp_path / "arithmetic-seed0" / "checkpoints", 3)
    damage(newest / "policy.bin")
    config = load_config(DEMO, [*overrides, f"data.train=[{{name: a, path: {tmp_path}/no.jsonl}}]"])
    checks = {check.name: check for check in check_run(config, DEMO, overrides, quick=True)}
    assert (checks["checkpoint"].status, words in checks["checkpoint"].found) == (status, True), checks["checkpoint"]


@pytest.mark.slow
def test_one_iteration_runs_and_log_probabilities_agree(tmp_path):
    overrides = _places(tmp_path)
    config = load_config(DEMO, overrides)
    checks = {check.name: check for check in check_run(config, DEMO, overrides, quick=False)}
    assert [name for name, check in checks.items() if check.status is not Status.OK] == []
    assert "engine and actor differ by at most" in checks["log-probabilities"].found
