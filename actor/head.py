"""Log-probabilities and entropy of target tokens without ever holding the logits of all tokens.

Tokens are processed in chunks; the forward keeps hidden states and two numbers per token, the backward computes each
chunk's logits again (as in Liger's fused linear cross entropy, https://arxiv.org/abs/2410.10989, here for a
vocabulary-parallel head, per-token gradients and entropy). At most [chunk_tokens, vocabulary / TP] logits exist, on a
GPU in the dtype of the hidden states alone (`actor.layers.logits`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from actor.layers.logits import Chosen, SoftmaxParts, logit_gradient, softmax_parts
from actor.layers.lora import HeadLora


@dataclass(frozen=True)
class TokenScores:
    """logprobs: float32 [t]. entropy: float32 [t] in nats, None where not asked for."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


@dataclass(frozen=True)
class _Inputs:
    """Of some tokens: logits are hidden @ weight.T, and low @ low_weight.T besides where the head has an adapter."""

    hidden: torch.Tensor
    weight: torch.Tensor
    low: torch.Tensor | None
    low_weight: torch.Tensor | None

    def part(self, rows: slice) -> "_Inputs":
        low = None if self.low is None else self.low[rows]
        return _Inputs(self.hidden[rows], self.weight, low, self.low_weight)


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary: `first` is its first token id, `columns` of its rows are real tokens."""

    first: int
    columns: int
    chunk_tokens: int
    group: dist.ProcessGroup | None

    def reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def logits(self, inputs: "_Inputs") -> torch.Tensor:
        """[chunk, columns] in the dtype of the hidden states, of which padding of the vocabulary is cut off."""
        logits = inputs.hidden @ inputs.weight[: self.columns].t()
        if inputs.low is not None and inputs.low_weight is not None:
            logits = logits.addmm_(inputs.low, inputs.low_weight[: self.columns].t())
        return logits

    def chosen(self, targets: torch.Tensor) -> Chosen:
        """Where this rank has the targets."""
        column = targets - self.first
        here = (column >= 0) & (column < self.columns)
        return Chosen(column.clamp(0, max(self.columns - 1, 0)), here.float())


def response_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    temperatures: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
    sequence_parallel: bool = False,
    group: dist.ProcessGroup | None = None,
    adapter: HeadLora | None = None,
) -> TokenScores:
    """Natural log-probability of `targets[i]` under softmax(hidden[i] @ weight.T / temperatures[i]), and its
    entropy.

    hidden: [t, 1, h] or [t, h]; under sequence parallelism this rank's slice of the t tokens, gathered here.
    weight: [padded vocabulary / TP, h]. targets: int64 [t]. vocab_size: the real vocabulary; padded rows get no
    probability. temperatures: float32 [t], 1 when left out. rows: int64 positions to compute; the others are 0 and get
    no gradient. All TP ranks get the same values; the hidden states' gradient is summed over them. group: the TP group,
    Megatron's own by default. adapter: of the head.
    """
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    hidden = hidden.flatten(0, 1) if hidden.dim() == 3 else hidden
    if sequence_parallel:
        # The head's own backward sums over TP ranks, so this backward must only take the local slice.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
    first = group.rank() * weight.shape[0]
    columns = max(0, min(weight.shape[0], vocab_size - first))
    shard = _Shard(first, columns, chunk_tokens, group)
    chosen = hidden if rows is None else hidden.index_select(0, rows)
    wanted = targets if rows is None else targets.index_select(0, rows)
    if temperatures is not None and rows is not None:
        temperatures = temperatures.index_select(0, rows)
    low, low_weight = (None, None) if adapter is None else (adapter.low(chosen), adapter.b)
    logprobs, entropy = _HeadFunction.apply(chosen, weight, low, low_weight, wanted, temperatures, shard, with_entropy)
    if not entropy_gradient:
        entropy = entropy.detach()
    if rows is not None:
        empty = torch.zeros(targets.shape[0], dtype=torch.float32, device=hidden.device)
        logprobs = empty.index_copy(0, rows, logprobs)
        entropy = empty.index_copy(0, rows, entropy) if with_entropy else entropy
    return TokenScores(logprobs, entropy if with_entropy else None)


class _HeadFunction(torch.autograd.Function):
    """Chunked head. With p = softmax(logits): d logprob = onehot - p, d entropy = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        low: torch.Tensor | None,
        low_weight: torch.Tensor | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        shard: _Shard,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = _Inputs(hidden, weight, low, low_weight)
        parts = [
            _score_chunk(inputs.part(rows), targets[rows], _part(temperatures, rows), shard, with_entropy)
            for rows in _chunks(len(targets), shard.chunk_tokens)
        ]
        empty = torch.zeros(3, 0, dtype=torch.float32, device=hidden.device)
        logprobs, entropy, normalizer = torch.cat([empty, *parts], 1).unbind(0)
        ctx.save_for_backward(hidden, weight, low, low_weight, targets, temperatures, entropy, normalizer)
        ctx.shard, ctx.with_entropy = shard, with_entropy
        return logprobs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logprob_gradient, entropy_gradient = gradients
        *tensors, targets, temperatures, entropy, normalizer = ctx.saved_tensors
        inputs, shard = _Inputs(*tensors), ctx.shard
        found = _Gradients(inputs, ctx.needs_input_grad)
        for rows in _chunks(len(targets), shard.chunk_tokens):
            if not shard.columns:
                continue
            part = inputs.part(rows)
            of_entropy = (entropy[rows], entropy_gradient[rows]) if ctx.with_entropy else None
            about = shard.chosen(targets[rows]), logprob_gradient[rows], of_entropy, _part(temperatures, rows)
            # Under a name the gradient would still be there when the next chunk's logits are made.
            found.add(part, rows, logit_gradient(shard.logits(part), normalizer[rows], *about))
        return (*found.finished(shard), None, None, None, None)


class _Gradients:
    """Gradients of `_Inputs`, of those weights alone that are trained."""

    def __init__(self, inputs: _Inputs, needed: tuple[bool, ...]) -> None:
        self._hidden = torch.zeros_like(inputs.hidden)
        self._low = None if inputs.low is None else torch.zeros_like(inputs.low)
        weights = (inputs.weight, inputs.low_weight)
        self._weights = [
            torch.zeros_like(weight, dtype=torch.float32) if weight is not None and wanted else None
            for weight, wanted in zip(weights, (needed[1], needed[3]), strict=True)
        ]

    def add(self, part: _Inputs, rows: slice, gradient: torch.Tensor) -> None:
        """gradient: of the logits of `rows`, [chunk, columns]."""
        columns = gradient.shape[1]
        self._hidden[rows] = gradient @ part.weight[:columns]
        if self._low is not None and part.low_weight is not None:
            self._low[rows] = gradient @ part.low_weight[:columns]
        for total, features in zip(self._weights, (part.hidden, part.low), strict=True):
            if total is not None and features is not None:
                total[:columns] += gradient.t() @ features

    def finished(self, shard: _Shard) -> tuple[torch.Tensor | None, ...]:
        """Of hidden, weight, low and low_weight."""
        dtype = self._hidden.dtype
        weight, low_weight = (None if total is None else total.to(dtype) for total in self._weights)
        low = None if self._low is None else shard.reduce(self._low)
        return shard.reduce(self._hidden), weight, low, low_weight


def _chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens)]


def _part(temperatures: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if temperatures is None else temperatures[rows]


def _score_chunk(
    inputs: _Inputs, targets: torch.Tensor, temperatures: torch.Tensor | None, shard: _Shard, with_entropy: bool
) -> torch.Tensor:
    """Float32 [3, chunk]: log-probability, entropy (0 unless wanted), log of the softmax's denominator."""
    if shard.columns:
        parts = softmax_parts(shard.logits(inputs), shard.chosen(targets), temperatures, with_entropy)
    else:
        parts = SoftmaxParts.of_nothing(targets)
    top = shard.reduce(parts.largest.clone(), dist.ReduceOp.MAX)
    below = parts.largest - top
    scale = below.exp()
    sums = [scale * parts.powers, parts.target]
    if with_entropy:
        sums.append(scale * (parts.weighted + below * parts.powers))
    total = shard.reduce(torch.stack(sums))
    log_denominator = total[0].log()
    normalizer = log_denominator + top
    entropy = log_denominator - total[2] / total[0] if with_entropy else torch.zeros_like(top)
    return torch.stack((total[1] - normalizer, entropy, normalizer))
