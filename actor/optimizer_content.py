"""What of the optimizer a checkpoint holds: master, moments and nothing else of each trained parameter.

Megatron's own optimizer content has learning rates and the step as plain values too, which rank 0 saves for all
ranks. It fails where a rank trains nothing of the dense or of the expert half (a frozen pipeline stage, only experts
trained, no expert layer in a stage), and the plain values are known without it: rates are set before each step, and
the step is the number of applied updates. So only tensors are saved, under the names of the model's own.
"""

from collections.abc import Iterator
from typing import Any

import torch

from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer._sync_sub_optimizers_state_to_hdo",
    why="loaded states reach the outer optimizer, too",
    drop_when="Megatron does it when it loads",
)


def optimizer_content(megatron: Any, models: dict[str, Any], loading: bool, metadata: dict[str, Any]) -> dict[int, Any]:
    """Half of the optimizer (0: dense, 1: experts) -> its sharded tensors, where this rank has any. Collective.

    models: sharded tensors of the model chunks, whose layout the optimizer's tensors have, too.
    """
    halves = {
        index: part.sharded_param_state_fully_reshardable(models, loading, metadata)
        for index, part in _trained_parts(megatron)
    }
    return {index: half for index, half in halves.items() if half}


def restore_optimizer(megatron: Any, loaded: dict[int, Any], applied_steps: int) -> None:
    """Take what `dist_checkpointing.load` made of `optimizer_content`, and count on from `applied_steps`."""
    for index, part in _trained_parts(megatron):
        hybrid = part.optimizer
        for state in hybrid.state.values():
            state["step"] = torch.full_like(state["step"], float(applied_steps))
        part.load_parameter_state_from_fully_reshardable(loaded.get(index, {}))
        hybrid._sync_sub_optimizers_state_to_hdo()
        hybrid.compact_state()


def _trained_parts(megatron: Any) -> Iterator[tuple[int, Any]]:
    """The halves that train something; on another rank that may be nothing of the same half."""
    for index, part in enumerate(megatron.chained_optimizers):
        if part.optimizer is not None:
            yield index, part
