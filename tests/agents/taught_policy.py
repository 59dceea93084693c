"""A tiny policy that knows by heart what a stand-in wrote, so that a real engine calls tools."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rlpipe.config.model import TinyPolicyConfig
from rlpipe.prepare.tiny_policy import make_tiny_policy
from rlpipe.shared.sample import Sample

_MOST_STEPS = 600
_LOSS = 0.002  # nats a token; of 100 tokens, four episodes of five are as they were taught
_SHAPE = TinyPolicyConfig(hidden_size=64, layers=2, heads=2, key_value_heads=1, head_dim=16, intermediate_size=64)


def make_taught_policy(folder: Path, taught: Sample) -> None:
    """Write a model that was trained on the tokens of `taught` which the policy wrote."""
    make_tiny_policy(_SHAPE, folder, seed=0)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_pretrained(folder)
        token_ids = torch.tensor([taught.prompt.token_ids + taught.response_ids])
        labels = token_ids.clone()
        labels[0, : taught.prompt_tokens] = -100
        labels[0, taught.prompt_tokens :][torch.tensor(taught.loss_mask) == 0] = -100
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(_MOST_STEPS):
            loss = model(input_ids=token_ids, labels=labels).loss
            if loss.item() < _LOSS:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.item() < _LOSS, f"the policy has not learned its text: {loss.item()}"
        model.save_pretrained(folder)
