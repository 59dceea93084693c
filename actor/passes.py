"""Forward and backward passes over packs, through Megatron's pipeline schedules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from actor.head import response_logprobs
from actor.losses.objective import objective
from actor.losses.requirements import needs_entropy, needs_reference
from actor.losses.types import LossOutput
from actor.models.policy_model import head_adapter, head_weight
from actor.prepared import PreparedPack, loss_inputs, prepare, whole_pack
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.pack import Pack

_Record = dict[str, Any]
_LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, _Record]]


@dataclass(frozen=True)
class HeadOptions:
    """How log-probabilities are made from hidden states."""

    vocab_size: int
    chunk_tokens: int


@dataclass(frozen=True)
class PackResult:
    """What the last pipeline stage knows about one trained pack. `finite` is a boolean scalar on the device."""

    pack: Pack
    output: LossOutput
    finite: Tensor


def forward_backward(
    chunks: Sequence[torch.nn.Module], packs: Sequence[Pack], head: HeadOptions, algorithm: AlgorithmConfig
) -> list[PackResult]:
    """Accumulate the gradients of `packs` into the gradient buffers; no gradient is exchanged between data ranks
    beyond what overlapping starts early. Returns one result per pack on the last stage, nothing elsewhere."""

    def loss_function(prepared: PreparedPack, chunk: torch.nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, _Record]:
        logprobs, entropy = _scores(prepared, chunk, hidden, head, algorithm)
        inputs = loss_inputs(prepared, logprobs, entropy, needs_reference(algorithm))
        output = objective(inputs, algorithm)
        loss = (inputs.weights * output.token_loss).sum()
        finite = torch.isfinite(loss.detach()) & torch.isfinite(logprobs.detach()).all()
        return loss, torch.tensor(0), {"result": PackResult(prepared.pack, _detached(output), finite)}

    records = _run(chunks, packs, loss_function, forward_only=False)
    return [record["result"] for record in records]


def score_packs(chunks: Sequence[torch.nn.Module], packs: Sequence[Pack], head: HeadOptions) -> list[Tensor]:
    """Log-probabilities of the trained tokens of each pack: float32 [T] on the device, 0 elsewhere; no gradients.

    Last stage only; other stages get an empty list.
    """

    def keep(prepared: PreparedPack, chunk: torch.nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, _Record]:
        logprobs, _ = _scores(prepared, chunk, hidden, head, None)
        return logprobs.sum(), torch.tensor(0), {"logprobs": logprobs}

    with torch.no_grad():
        return [record["logprobs"] for record in _run(chunks, packs, keep, forward_only=True)]


def _run(
    chunks: Sequence[torch.nn.Module],
    packs: Sequence[Pack],
    loss_function: Callable[[PreparedPack, torch.nn.Module, Tensor], tuple[Tensor, Tensor, _Record]],
    forward_only: bool,
) -> list[_Record]:
    device = next(chunks[0].parameters()).device
    prepared = [prepare(pack, device) for pack in packs]
    iterators = [iter(prepared) for _ in chunks]

    def forward_step(iterator: Iterator[PreparedPack], chunk: torch.nn.Module) -> tuple[Tensor, _LossFunction]:
        one = next(iterator)
        return chunk(one.inputs), partial(loss_function, one, chunk)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(packs),
        seq_length=max(one.total_tokens for one in prepared),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _scores(
    prepared: PreparedPack, chunk: torch.nn.Module, hidden: Tensor, head: HeadOptions, algorithm: AlgorithmConfig | None
) -> tuple[Tensor, Tensor | None]:
    with_entropy = algorithm is not None and needs_entropy(algorithm)
    scores = response_logprobs(
        hidden,
        head_weight(chunk),
        prepared.inputs.targets,
        vocab_size=head.vocab_size,
        temperatures=prepared.temperatures,
        chunk_tokens=head.chunk_tokens,
        rows=prepared.trained,
        with_entropy=with_entropy,
        entropy_gradient=algorithm is not None and algorithm.entropy_coefficient > 0,
        sequence_parallel=parallel_state.get_tensor_model_parallel_world_size() > 1
        and _model_config(chunk).sequence_parallel,
        adapter=head_adapter(chunk),
    )
    entropy = None if scores.entropy is None else whole_pack(scores.entropy, prepared)
    return whole_pack(scores.logprobs, prepared), entropy


def _model_config(chunk: torch.nn.Module) -> Any:
    return getattr(chunk, "module", chunk).config


def _detached(output: LossOutput) -> LossOutput:
    return LossOutput(
        token_loss=output.token_loss.detach(),
        means={name: (a.detach(), b.detach()) for name, (a, b) in output.means.items()},
        totals={name: value.detach() for name, value in output.totals.items()},
        maxima={name: value.detach() for name, value in output.maxima.items()},
    )
