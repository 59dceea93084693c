"""Rotary positions of a batch without images are those of its tokens, three times over.

A model that can see, as Qwen3.5 in every form, has three positions for each token: of time, height and width. SGLang
builds them on the host, request by request, in every step, and sends them to the device: with 128 requests a third of
what a scheduler does. The positions of tokens are on the device already, and for text all three are these.
"""

from typing import Any

from rlpipe.shared.replaced_parts import replaces

_POSITIONS = replaces(
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch._compute_mrope_positions",
    why="positions of text are built on the host for each request of each step",
    drop_when="SGLang takes the positions of tokens for batches of text, as its pull requests 25557 and 30404 begin to",
)


def install() -> None:
    """In a scheduler's process, before it starts."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    original = _POSITIONS.original()

    def compute_mrope_positions(self: Any, model_runner: Any, batch: Any) -> None:
        # A diffusion model's positions are of its block.
        if batch.dllm_config is not None or any(one is not None for one in batch.multimodal_inputs):
            original(self, model_runner, batch)
        else:
            self.mrope_positions = self.positions.long().repeat(3, 1)

    ForwardBatch._compute_mrope_positions = compute_mrope_positions
