"""Adds up what the ranks know about a step, so that no number depends on how the batch was split."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from actor.device import compute_device
from actor.passes import PackResult


def reduce_metrics(results: Sequence[PackResult]) -> dict[str, float]:
    """Metrics of a step from the packs of all data-parallel ranks; {} except on the last pipeline stage.

    Collective over the data-parallel group of the last stage. Sums and counts travel in float64.
    """
    if not results:
        return {}
    outputs = [result.output for result in results]
    totals = sorted(outputs[0].totals)
    means = sorted(outputs[0].means)
    maxima = sorted(outputs[0].maxima)
    sums = [sum(output.totals[name] for output in outputs) for name in totals]
    sums += [sum(output.means[name][part] for output in outputs) for part in (0, 1) for name in means]
    added = _all_reduce(sums, dist.ReduceOp.SUM)
    largest = _all_reduce(
        [torch.stack([output.maxima[name] for output in outputs]).max() for name in maxima], dist.ReduceOp.MAX
    )
    numerators, counts = added[len(totals) : len(totals) + len(means)], added[len(totals) + len(means) :]
    return {
        **dict(zip(totals, added, strict=False)),
        **{name: a / max(b, 1.0) for name, a, b in zip(means, numerators, counts, strict=True)},
        **dict(zip(maxima, largest, strict=True)),
    }


def first_non_finite(results: Sequence[PackResult]) -> tuple[str, ...] | None:
    """Sample ids of this rank's packs whose loss or log-probabilities are not finite; None if all are."""
    if not results:
        return None
    finite = torch.stack([result.finite for result in results]).tolist()
    if all(finite):
        return None
    return tuple(
        sample for result, good in zip(results, finite, strict=True) if not good for sample in result.pack.sample_ids
    )


def sum_over_data_and_context(value: torch.Tensor) -> float:
    """Sum of a scalar that each data and context rank of this pipeline stage has a part of. Collective over them."""
    total = value.detach().to(torch.float64)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(total)


def any_rank(flag: bool) -> bool:
    """True on every process if `flag` is true on one. Collective over all processes."""
    value = torch.tensor([float(flag)], device=compute_device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def union_of_ids(ids: Sequence[str]) -> tuple[str, ...]:
    """The ids of all processes, without repetition, in a fixed order. Collective over all processes."""
    gathered: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, tuple(ids))
    return tuple(sorted({name for part in gathered for name in part}))


def _all_reduce(values: Sequence[torch.Tensor | float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    if not values:
        return []
    stacked = torch.stack([torch.as_tensor(value).to(torch.float64) for value in values])
    dist.all_reduce(stacked, op=operation, group=parallel_state.get_data_parallel_group())
    return stacked.tolist()
