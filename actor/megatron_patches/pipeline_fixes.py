"""Fixes of Megatron's pipeline schedules and their communication (megatron-core 0.16.1). Process-global."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from rlpipe.shared.replaced_parts import replaces

replaces(
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
    why="with two stages the interleaved schedule takes one neighbour's shape for the other's",
    drop_when="both stages post their messages in an order that tells them apart",
)
replaces(
    "megatron.core.pipeline_parallel.schedules:get_pp_rank_microbatches",
    why="a stage whose warm-up is as long as the step counts as one that warms up only, and waits for ever",
    drop_when="the interleaved schedule runs with as many packs as stages and shapes of their own",
)

_DIMENSIONS = 3


@lru_cache(maxsize=1)
def install_pipeline_fixes() -> None:
    """Install the fixes; further calls do nothing."""
    P2PCommunicator._communicate_shapes = _exchange_shapes
    schedules.get_pp_rank_microbatches = _with_the_neighbours_exchange(schedules.get_pp_rank_microbatches)


def _with_the_neighbours_exchange(count: Callable[..., tuple[int, bool, int, int]]) -> Callable[..., Any]:
    """schedules.py:785 takes a stage whose warm-up is just as long as the whole step for one that warms up only.

    The flag decides whether the last forward pass is sent alone or in one exchange with the first gradient. The next
    stage warms up two passes less, so where the lengths are equal it is past its warm-up and exchanges both at once:
    with shapes of their own (`variable_seq_lengths`) the two stages then wait for each other for ever. It happens with
    as many packs as stages, the fewest that the interleaved schedule takes.
    """

    def counts(packs: int, chunks: int, group: int, *args: Any, **options: Any) -> tuple[int, bool, int, int]:
        total, only_warm_up, warm_up, rest = count(packs, chunks, group, *args, **options)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        later = stages - parallel_state.get_pipeline_model_parallel_rank() - 1
        if 2 * later + (chunks - 1) * group == total:
            only_warm_up = False
        return total, only_warm_up, warm_up, rest

    return counts


def _exchange_shapes(
    self: Any, send_next: torch.Tensor | None, send_prev: torch.Tensor | None, recv_prev: bool, recv_next: bool
) -> tuple[list[int], list[int]]:
    """Shapes of the tensors that the previous and the next stage are about to send; zeros where none is expected.

    With two stages both neighbours are the same process, which matches messages in the order they are posted:
    p2p_communication.py:219 posts them in the same order on both, so that an interleaved schedule over packs of
    different lengths takes one neighbour's shape for the other's. Odd stages post their two directions the other way.
    """
    device = torch.cuda.current_device()
    shapes = {name: torch.zeros(_DIMENSIONS, dtype=torch.int64, device=device) for name in ("prev", "next")}
    ops: dict[str, list[dist.P2POp]] = {"prev": [], "next": []}
    for name, sent, expected, rank in (
        ("prev", send_prev, recv_prev, self.prev_rank),
        ("next", send_next, recv_next, self.next_rank),
    ):
        if sent is not None:
            shape = torch.tensor(sent.shape, dtype=torch.int64, device=device)
            ops[name].append(dist.P2POp(dist.isend, shape, rank, self.pp_group))
        if expected:
            ops[name].append(dist.P2POp(dist.irecv, shapes[name], rank, self.pp_group))
    ordered = ops["prev"] + ops["next"] if self.pp_group.rank() % 2 == 0 else ops["next"] + ops["prev"]
    for request in dist.batch_isend_irecv(ordered) if ordered else []:
        request.wait()
    return shapes["prev"].tolist(), shapes["next"].tolist()
