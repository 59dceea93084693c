"""SGLang's adapters on a machine without CUDA: no pinned memory, and rows that do not depend on how many there are.

SGLang's own form for CPUs pins memory, and multiplies request by request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlpipe.shared.replaced_parts import replaces

replaces(
    "sglang.srt.lora.backend.lora_registry:LORA_SUPPORTED_BACKENDS",
    "sglang.srt.lora.layers:torch",
    "torch._C:TensorBase.pin_memory",
    why="layers with adapters pin memory, and their products round differently with the number of rows",
    drop_when="SGLang's adapters work without CUDA, each row as if it were alone",
)

_Rows = slice | torch.Tensor


@dataclass
class _Batch:
    """slots: by place in the pool of adapters, its rank and scale and the tokens that use it."""

    slots: dict[int, tuple[int, float, _Rows]]
    has_active_lora: bool = False


def install() -> None:
    """Call in a scheduler process before the engine is made."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import lora_registry

    layers.torch = _Unpinned()
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    lora_registry.LORA_SUPPORTED_BACKENDS["torch_native"] = _backend


class _Unpinned:
    """torch, whose new tensors are not pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *values: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*values, **options)


def _backend() -> type:
    from sglang.srt.lora.backend.base_backend import BaseLoRABackend
    from sglang.srt.lora.utils import generate_sequence_lengths

    class RowsBackend(BaseLoRABackend):
        """Products of all tokens of an adapter at once."""

        name = "torch_native"

        def __init__(self, max_loras_per_batch: int, device: torch.device, **_: Any) -> None:
            super().__init__(max_loras_per_batch, device)

        def prepare_lora_batch(
            self,
            forward_batch: Any,
            weight_indices: list[int],
            lora_ranks: list[int],
            scalings: list[float],
            **_: Any,
        ) -> None:
            lengths = generate_sequence_lengths(forward_batch, device="cpu")
            used = torch.repeat_interleave(torch.tensor(weight_indices), lengths)
            ranked = sorted({slot for slot in weight_indices if lora_ranks[slot]})
            self.batch_info = _Batch({slot: (lora_ranks[slot], scalings[slot], _rows(used == slot)) for slot in ranked})

        def run_lora_a_sgemm(
            self, x: torch.Tensor, weights: torch.Tensor, stack_num: int = 1, **_: Any
        ) -> torch.Tensor:
            return _first(x, weights, self.batch_info, stack_num)

        def run_lora_b_sgemm(
            self,
            x: torch.Tensor,
            weights: torch.Tensor,
            output_offset_cpu: torch.Tensor,
            base_output: torch.Tensor,
            **_: Any,
        ) -> torch.Tensor:
            return _second(x, weights, self.batch_info, output_offset_cpu.tolist(), base_output)

        def run_qkv_lora(
            self,
            x: torch.Tensor,
            qkv_lora_a: torch.Tensor,
            qkv_lora_b: torch.Tensor,
            output_offset_cpu: torch.Tensor,
            base_output: torch.Tensor,
            n_slices: int = 3,
            **_: Any,
        ) -> torch.Tensor:
            low = _first(x, qkv_lora_a, self.batch_info, n_slices)
            return _second(low, qkv_lora_b, self.batch_info, output_offset_cpu.tolist(), base_output)

        def run_gate_up_lora(
            self,
            x: torch.Tensor,
            gate_up_lora_a: torch.Tensor,
            gate_up_lora_b: torch.Tensor,
            output_offset_cpu: torch.Tensor,
            base_output: torch.Tensor,
            **_: Any,
        ) -> torch.Tensor:
            low = _first(x, gate_up_lora_a, self.batch_info, 2)
            return _second(low, gate_up_lora_b, self.batch_info, output_offset_cpu.tolist(), base_output)

    return RowsBackend


def _rows(chosen: torch.Tensor) -> _Rows:
    """As cheap an index as there is for the tokens that `chosen` [tokens] marks."""
    return slice(None) if bool(chosen.all()) else chosen


def _first(x: torch.Tensor, weights: torch.Tensor, batch: _Batch, parts: int) -> torch.Tensor:
    """x: [tokens, in]; weights: [slots, parts x largest rank, in]. Returns scale x a(x), [tokens, parts x largest
    rank], each part's rows one after another in as much room as its rank needs."""
    low = x.new_zeros(len(x), weights.shape[1])
    for slot, (rank, scale, rows) in batch.slots.items():
        low[rows, : parts * rank] = scale * torch.mm(x[rows], weights[slot, : parts * rank].t())
    return low


def _second(
    low: torch.Tensor, weights: torch.Tensor, batch: _Batch, offsets: Sequence[int], output: torch.Tensor
) -> torch.Tensor:
    """Adds b(low) of each part to its columns of `output` [tokens, out], in place."""
    for slot, (rank, _, rows) in batch.slots.items():
        for part, (start, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
            of_part = low[rows, part * rank : (part + 1) * rank]
            output[rows, start:stop] += torch.mm(of_part, weights[slot, start:stop, :rank].t())
    return output
