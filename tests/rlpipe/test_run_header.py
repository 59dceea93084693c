"""What a run says of itself before it starts."""

import pytest

from rlpipe.config.load import load_config
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.run_header import run_header


def _header(folder, *settings):
    config = load_config("configs/demo/arithmetic.yaml", list(settings))
    return dict(run_header(config, RunDirectory(folder)))


def _kernels(folder, *settings):
    return _header(folder, *settings)["kernels"]


@pytest.mark.parametrize(
    ("capability", "address", "said"),
    [
        (None, None, "1 engine of 2 processes, float32, sync, as if on the actor's GPUs"),
        ((9, 0), None, "1 engine of 2 GPUs, float32, sync, on the actor's GPUs"),
        (None, "10.0.0.1:6379", "1 engine of 2 GPUs, float32, sync, on the actor's GPUs"),
    ],
)
def test_an_engine_has_gpus_where_there_are_some(tmp_path, monkeypatch, capability, address, said):
    monkeypatch.setattr("rlpipe.monitoring.run_header.visible_capability", lambda: capability)
    settings = "rollout.engine.tensor_parallel=2", "ray.colocate=true", "actor.processes=2"
    header = _header(tmp_path, *settings, *([f"ray.address={address}"] if address else []))
    assert header["rollout"] == said and ("kernels" in header) == (address is None)


def test_kernels_that_a_configuration_names_are_told(tmp_path):
    chosen = _kernels(tmp_path)
    assert "as set" not in chosen
    settings = "rollout.engine.sglang={attention_backend: intel_amx, page_size: 1}", "actor.gdn_backend=torch"
    assert _kernels(tmp_path, *settings) == f"{chosen}; but as set actor.gdn_backend torch, attention_backend intel_amx"
