"""What the benchmark of long sequences shows of a plan beside what it measures."""

import json
import sys
from pathlib import Path

import pytest

from rlpipe.commands.clusters import load_cluster
from rlpipe.config.load import load_config
from rlpipe.estimate.run_estimate import plan
from rlpipe.training.trained_share import planned_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(("gpus", "tokens"), [(1, 65_536), (2, 262_144)])
def test_the_plan_of_a_gpu_s_peak_holds_what_the_optimizer_keeps_there(gpus, tokens, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import long_context
    from layer_shapes import hybrid_config

    layout = ["--gpus", str(gpus), "--context", str(gpus), "--expert", str(gpus), "--tokens", str(tokens)]
    monkeypatch.setattr(sys, "argv", ["long_context", *layout])
    options = long_context._arguments()
    (tmp_path / "config.json").write_text(json.dumps(hybrid_config(8, 32_768, tiny=False)))
    path = long_context._write_configuration(options, tmp_path, str(tmp_path), tokens)
    config = load_config(path)
    estimate = plan(config, planned_model(config), load_cluster(f"local_{gpus}x141gb"))
    figures = long_context._planned(estimate, tokens, options)
    (actor,) = (need for need in estimate.needs if need.name == "actor GPU")
    assert estimate.kept_state_bytes > 0
    assert figures["memory/actor_gpu_peak_bytes"] == actor.total + estimate.kept_state_bytes
    assert figures["memory/actor_gpu_peak_bytes"] <= estimate.cluster.node.gpu_memory_gigabytes * 1e9
    assert figures.keys() <= {column.metric for column in long_context.COLUMNS}
