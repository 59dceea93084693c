"""PEFT's answers for the tests of adapters: adapters of random values, and a few steps of Adam over packs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_support import TinyModel

from rlpipe.shared.pack import Pack

LEARNING_RATE = 1e-3
EPSILON = 1e-6  # above the rounding of gradients that are zero but for it, which Adam would blow up
OPTIMIZER = {"learning_rate": LEARNING_RATE, "epsilon": EPSILON, "max_gradient_norm": 1e6}


@dataclass(frozen=True)
class LoraCase:
    """A model and its adapters: `actor.lora`'s settings, and what says the same to PEFT."""

    model: TinyModel
    targets: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model.name}_{'_'.join((*self.targets, *(f'{k}_{v}' for k, v in self.settings.items())))[:60]}"

    def lora(self, start: Path) -> dict[str, Any]:
        targets = [*self.targets, *(name.removesuffix(".weight") for name in self.parameters)]
        own = {"rank": 4, "alpha": 8.0, "targets": targets, "start_path": str(start)}
        return own | ({"experts": "each"} if self.parameters else {}) | self.settings


def peft_model(path: Path, case: LoraCase) -> Any:
    """The model with random adapters, none of whose factors is zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = case.lora(Path())
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plain)
    config = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        use_rslora=settings.get("use_rslora", False),
        target_modules=list(case.targets),
        target_parameters=list(case.parameters) or None,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


def peft_logprobs(model: Any, pack: Pack) -> torch.Tensor:
    """Of all targets of the pack, one sequence at a time."""
    parts = []
    for start, end in pairwise(pack.cu_seqlens_padded):
        logits = model(input_ids=torch.from_numpy(pack.token_ids[start:end])[None], use_cache=False).logits[0].float()
        wanted = torch.from_numpy(pack.targets[start:end])
        parts.append(torch.log_softmax(logits, -1).gather(1, wanted[:, None])[:, 0])
    return torch.cat(parts)


def train_with_peft(model: Any, packs: Sequence[Pack], steps: int) -> dict[str, Any]:
    """Log-probabilities of the start, losses of `steps` steps of Adam, gradients of the first of them."""
    from peft import get_peft_model_state_dict

    with torch.no_grad():
        logprobs = peft_logprobs(model, packs[0]).numpy() * packs[0].loss_mask
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.98), eps=EPSILON, weight_decay=0.0)
    losses, gradients = [], {}
    for _ in range(steps):
        adam.zero_grad()
        loss = sum(-(peft_logprobs(model, pack) * torch.from_numpy(pack.loss_weights)).sum() for pack in packs)
        loss.backward()
        if not gradients:
            before = [parameter.data for parameter in trained]
            for parameter in trained:
                parameter.data = parameter.grad
            gradients = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
            for parameter, data in zip(trained, before, strict=True):
                parameter.data = data
        adam.step()
        losses.append(float(loss.detach()))
    adapters = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    return {"logprobs": np.asarray(logprobs), "losses": losses, "gradients": gradients, "adapters": adapters}
