"""Puts an update's factors into SGLang's pool of adapters, in a scheduler process."""

from collections.abc import Mapping
from typing import Any

import torch

from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "sglang.srt.lora.lora_manager:LoRAManager._notify_lora_slots_updated",
    "sglang.srt.lora.lora_manager:LoRAManager.load_lora_weights_from_tensors",
    "sglang.srt.lora.mem_pool:LoRAMemoryPool.load_lora_weight_to_buffer",
    why="an adapter is filled where it is, so that requests and captured graphs that use it need not know",
    drop_when="SGLang loads an adapter again under its name, while requests that use it wait",
)


@torch.no_grad()
def load_adapter(manager: Any, factors: Mapping[str, torch.Tensor]) -> None:
    """manager: SGLang's LoRAManager, with one adapter. factors: by PEFT's name, whole, on the host; SGLang takes this
    rank's part of them. Raises ValueError for factors that it would leave out."""
    (reference,) = manager.lora_refs.values()
    manager.load_lora_weights_from_tensors(reference, dict(factors))
    adapter, pool = manager.loras[reference.lora_id], manager.memory_pool
    _check_taken(adapter, pool.target_modules, factors)
    slot = pool.uid_to_buffer_id.get(reference.lora_id)
    if slot is not None:  # else SGLang loads it with the first request
        modules = manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module
        pool.load_lora_weight_to_buffer(reference.lora_id, slot, adapter, *modules)
        manager._notify_lora_slots_updated({slot})


def _check_taken(adapter: Any, modules: set[str], factors: Mapping[str, torch.Tensor]) -> None:
    """SGLang says nothing of what it does not know."""
    taken = {name: tensor for layer in adapter.layers for name, tensor in layer.weights.items()}
    unknown = [name for name in taken if not any(module in name for module in modules)]
    elements = sum(tensor.numel() for name, tensor in taken.items() if name.endswith("lora_B.weight"))
    sent = sum(tensor.numel() for name, tensor in factors.items() if name.endswith("lora_B.weight"))
    if unknown or elements != sent:
        missing = ", ".join(unknown[:3]) or f"{sent - elements} of {sent} values"
        raise ValueError(f"SGLang takes no adapters for {missing}")
