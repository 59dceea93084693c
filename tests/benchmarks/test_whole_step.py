"""The benchmark of whole iterations runs on a CPU, and leaves what has finished when it is cut off."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlpipe.estimate.memory import load_model

PROJECT = Path(__file__).resolve().parents[2]
SECONDS = 600
TINY = "--tiny --vocabulary 320 --response-tokens 12 --prompts 2 --samples 2 --iterations 500 --kl"


@pytest.mark.slow
def test_a_run_that_is_cut_off_leaves_its_iterations_beside_the_plan(tmp_path):
    output = tmp_path / "whole_step.json"
    command = [sys.executable, "benchmarks/whole_step.py", *TINY.split(), "--json", str(output)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    benchmark = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, text=True)
    begin = time.monotonic()
    while not (output.exists() and json.loads(output.read_text())["runs"][0]["iterations"]):
        assert benchmark.poll() is None and time.monotonic() < begin + SECONDS, benchmark.communicate()
        time.sleep(0.2)
    children = psutil.Process(benchmark.pid).children(recursive=True)
    benchmark.send_signal(signal.SIGTERM)
    printed, _ = benchmark.communicate(timeout=SECONDS)
    assert benchmark.returncode == 0, printed
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert gone and not alive

    (run,) = json.loads(output.read_text())["runs"]
    assert run["ended"] == "stopped by signal 15"
    first = run["iterations"][0]
    assert first["rollout/response_tokens_mean"] == 12
    assert first["perf/start_to_first_token_seconds"] > 0
    assert 0 < first["perf/optimizer_exposed_share"] < 1
    assert first["memory/actor_host_peak_bytes"] > 1e8 and first["memory/engine_host_peak_bytes"] > 1e8
    start = run["start_seconds"]
    assert start["engine_import"] > 0 and f"start, s: inputs {start['inputs']:.1f}, " in printed
    for phase in ("rollout", "ref_logprob", "optimizer", "step"):
        assert run["planned"][phase] > 0 and f"\n{phase} s" in printed


@pytest.mark.parametrize("model", sorted(path.name for path in (PROJECT / "configs" / "models").iterdir()))
def test_every_bundled_model_has_its_text_model_planned_whole(tmp_path, monkeypatch, model):
    """Of one that sees pictures too, sizes stand one level deeper in its `config.json`."""
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    monkeypatch.setattr("sys.argv", ["whole_step.py", "--model", model, "--response-tokens", "64"])
    from whole_step import arguments
    from whole_step_setup import Case, Setup

    options = arguments()
    setup = Setup(options, tmp_path, options.here)
    case = Case(64, "off", "torch", 0)
    layers = setup.layers([case])
    (tmp_path / "config.json").write_text(json.dumps(setup.shape(layers)))
    planned = setup.plan(setup.write_configuration(case, str(tmp_path)))
    whole = load_model(model)
    assert layers == len(planned.model.shape.layers) == len(whole.shape.layers)
    assert planned.model.parameters == whole.parameters
