"""How adapters begin, and what of their inputs is left out while they are trained."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rlpipe.config.lora import LoraConfig


@pytest.mark.parametrize(
    ("init", "largest", "spread"), [("kaiming", 1 / 20, 1 / 20 / 3**0.5), ("gaussian", 1.0, 1 / 8)]
)
def test_the_first_factor_is_drawn_as_is_said(init, largest, spread):
    from actor.hf.adapter_weights import _FreshFactors

    factors = _FreshFactors((), LoraConfig(rank=8, init=init), seed=0)
    factors._shapes = {"x.lora_A.weight": (8, 400)}
    drawn = factors.read_slice("x.lora_A.weight", 0, 0, 8)
    assert drawn.abs().max() <= largest
    assert float(drawn.std()) == pytest.approx(spread, rel=0.05)


def test_factors_of_other_names_and_of_other_seeds_begin_otherwise():
    from actor.hf.adapter_weights import _FreshFactors

    drawn = set()
    for seed, name in ((0, "x"), (0, "y"), (1, "x"), (0, "x")):
        factors = _FreshFactors((), LoraConfig(rank=2), seed)
        factors._shapes = {f"{name}.lora_A.weight": (2, 4)}
        drawn.add(tuple(factors.read_slice(f"{name}.lora_A.weight", 0, 0, 2).flatten().tolist()))
    assert len(drawn) == 3


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_so_much_of_the_inputs_is_left_out_as_is_said_and_nothing_outside_of_training(monkeypatch, share):
    from actor.layers import lora

    monkeypatch.setattr(lora.parallel_state, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(lora, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=lambda states: nullcontext()))
    place = lora.LoraPlace("x", 1, ((None, 4),), (4,))
    adapter = lora.Lora(
        SimpleNamespace(sequence_parallel=False), place, torch.ones(4, 6), LoraConfig(rank=2, dropout=share)
    )
    inputs = torch.ones(20_000)
    assert float((adapter.dropped(inputs, "any") == 0).float().mean()) == pytest.approx(share, abs=0.02)
    assert (adapter.eval().dropped(inputs, "any") == inputs).all()
