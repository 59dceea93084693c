"""Rotary positions of batches by SGLang alone and as a scheduler's process computes them; prints both as JSON, and how
many operations that took."""

import json
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers import scheduler
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, clamp_position, compute_position
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.sglang_patches.scheduler_process import run_scheduler

RUNNER = SimpleNamespace(device="cpu")
IMAGE = SimpleNamespace(
    mrope_positions=torch.arange(30).view(3, 10) * 7,
    mrope_position_delta=torch.tensor([[5]]),
    mrope_position_delta_repeated_cache=None,
)
# Tokens that are cached, and that are new, of each request.
REQUESTS = {"few": [(0, 3), (4, 6), (9, 1)], "many": [(n, 1 + n % 5) for n in range(64)], "image": [(0, 3), (2, 8)]}


class Operations(TorchDispatchMode):
    """Counts what is computed inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.count += 1
        return function(*arguments, **(keywords or {}))


def main() -> None:
    deterministic = SimpleNamespace(rl_on_policy_target=None)
    forward_batch_info.get_exec = lambda: SimpleNamespace(deterministic=deterministic)
    alone = found()
    scheduler.run_scheduler_process = lambda *_: print(json.dumps([alone, found()]))
    run_scheduler(SimpleNamespace(enable_deterministic_inference=False, device="cpu", speculative_algorithm=None))


def found() -> dict[str, tuple[list[list[int]], str, int]]:
    """Positions [3, tokens], their dtype and the operations for them, of each batch in each mode."""
    modes = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED)
    return {f"{name} {mode.name}": computed(name, mode) for name in REQUESTS for mode in modes}


def computed(name: str, mode: ForwardMode) -> tuple[list[list[int]], str, int]:
    cached, new = zip(*REQUESTS[name], strict=True)
    batch = SimpleNamespace(
        extend_lens=new,
        prefix_lens=cached,
        multimodal_inputs=[None] * (len(new) - 1) + [IMAGE if name == "image" else None],
        dllm_config=None,
    )
    one = object.__new__(ForwardBatch)
    one.forward_mode = mode
    one.seq_lens_cpu = torch.tensor(cached) + torch.tensor(new)
    one.positions = clamp_position(one.seq_lens_cpu)
    if mode is not ForwardMode.DECODE:
        lengths = (torch.tensor(tokens, dtype=torch.int32) for tokens in (cached, new))
        one.positions, _ = compute_position("torch_native", *lengths, sum(new))
    with Operations() as operations:
        one._compute_mrope_positions(RUNNER, batch)
    return one.mrope_positions.tolist(), str(one.mrope_positions.dtype), operations.count


if __name__ == "__main__":
    main()
