"""Folders of random policies are what transformers takes for checkpoints of their configuration."""

from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", [pytest.param("hybrid", marks=pytest.mark.slow), "dense"])
def test_transformers_finds_every_weight(kind, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    from layer_shapes import hybrid_config, qwen3_config
    from random_policy import save_random_policy
    from transformers import AutoModelForCausalLM

    config = hybrid_config(4, 512, tiny=True) if kind == "hybrid" else qwen3_config(tiny=True)
    folder = save_random_policy(config, tmp_path / kind, "float32")
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_the_next_token_is_known_about_half_of_the_time_however_many_layers_there_are(tmp_path, monkeypatch):
    """Without this a draft of random weights is never kept, and what drafts gain cannot be measured."""
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    from layer_shapes import hybrid_config
    from random_policy import save_random_policy
    from transformers import AutoModelForCausalLM

    folder = save_random_policy(hybrid_config(8, 512, tiny=True), tmp_path / "known", "float32", known_next=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    following = (embedding @ head.T).argmax(-1)
    tokens = torch.arange(64)
    with torch.no_grad():
        probabilities = model(tokens[None]).logits[0].softmax(-1)
    assert 0.4 < probabilities[tokens, following[tokens]].mean() < 0.9


def test_small_tensors_keep_no_more_than_themselves(monkeypatch):
    """As views of what is drawn, those of a tiny policy held 19 GB."""
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    from random_policy import _tensor

    from rlpipe.shared.weights import TensorSpec

    drawn = torch.randn(1000)
    small = _tensor(TensorSpec("model.layers.0.mlp.up_proj.weight", "float32", (4, 5)), drawn, 1.0)
    assert torch.equal(small.flatten(), drawn[:20])
    assert small.untyped_storage().nbytes() == 80
    large = _tensor(TensorSpec("model.embed_tokens.weight", "float32", (30, 100)), drawn, 1.0)
    assert torch.equal(large.flatten(), drawn.repeat(3))
