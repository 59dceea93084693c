"""What a run says of itself before it starts."""

from rlpipe.config.load import load_config
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.run_header import run_header


def _kernels(folder, *settings):
    config = load_config("configs/demo/arithmetic.yaml", list(settings))
    return dict(run_header(config, RunDirectory(folder)))["kernels"]


def test_kernels_that_a_configuration_names_are_told(tmp_path):
    chosen = _kernels(tmp_path)
    assert "as set" not in chosen
    settings = "rollout.engine.sglang={attention_backend: intel_amx, page_size: 1}", "actor.gdn_backend=torch"
    assert _kernels(tmp_path, *settings) == f"{chosen}; but as set actor.gdn_backend torch, attention_backend intel_amx"
