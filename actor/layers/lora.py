"""LoRA: `output + scale x b(a(input))` beside a frozen linear layer or embedding.

Factors are cut over ranks as `actor.hf.adapter_table` says. What travels between tensor-parallel ranks for them has the
width of the rank of the adapter, and lies beside what the layer itself sends.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import _split_tensor_factory
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from actor.layers.float8_weight import used_whole
from rlpipe.config.lora import LoraConfig
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear._forward_impl",
    "megatron.core.tensor_parallel.layers:RowParallelLinear._forward_impl",
    why="a weight of 8 bits is made whole for the product alone",
    drop_when="a layer takes the function that multiplies",
)
relies_on(
    "megatron.core.ssm.gated_delta_net:_split_tensor_factory",
    why="a checkpoint holds the parts of a fused projection apart, and those of its adapter too",
    drop_when="Megatron names it without an underscore",
)

_SAME_EVERYWHERE, _OWN = get_data_parallel_rng_tracker_name(), "model-parallel-rng"


@dataclass(frozen=True)
class LoraPlace:
    """Which weight an adapter belongs to, and whose its rows are.

    target: the weight's global name. pairs: pairs of factors. rows: (number of the pair or None, rows) of this rank's
    rows of the weight, in their order. sections: rows of the parts that tensor parallelism cuts separately.
    """

    target: str
    pairs: int
    rows: tuple[tuple[int | None, int], ...]
    sections: tuple[int, ...]


class Lora(torch.nn.Module):
    """The two factors of one frozen weight. Subclasses say how they are cut and applied.

    a: [pairs of factors x rank, in]. b: [out, rank], in which each row belongs to one of the pairs.
    """

    sharded_axes: dict[str, int] = {}
    """The factors that are cut over tensor-parallel ranks, and along which dimension."""

    partial: tuple[str, ...] = ()
    """The factors whose gradients come from a rank's own tokens alone under sequence parallelism."""

    def __init__(self, config: Any, place: LoraPlace, weight: Tensor, lora: LoraConfig) -> None:
        super().__init__()
        self.config, self.place = config, place
        self.scale, self.rank, self.dropout = lora.scale, lora.rank, lora.dropout
        self.group = parallel_state.get_tensor_model_parallel_group()
        shapes = self.shapes(weight, place.pairs)
        for name, shape in zip(("a", "b"), shapes, strict=True):
            factor: Any = torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
            self._mark(name, factor)
            setattr(self, name, factor)

    a: Tensor
    b: Tensor

    def shapes(self, weight: Tensor, pairs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of this rank's factors."""
        return (pairs * self.rank, weight.shape[1]), (weight.shape[0], self.rank)

    def _mark(self, name: str, factor: Any) -> None:
        """What Megatron's gradient sums and norm read."""
        if name in self.sharded_axes:
            factor.tensor_model_parallel, factor.partition_stride = True, 1
            factor.partition_dim = self.sharded_axes[name]
        factor.sequence_parallel = name in self.partial and self.config.sequence_parallel

    def delta(self) -> Tensor:
        """What the adapter adds to this rank's weight, float32 and in the weight's shape."""
        return self.scale * (self.b.float() @ self.a.float())

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """weight + scale x b @ a, computed in float32 and rounded once, as a new tensor."""
        return (weight.float() + self.delta()).to(weight.dtype)

    def dropped(self, x: Tensor, states: str) -> Tensor:
        """`x` with a share of it left out while training. states: the generator that Megatron keeps for `x`, which
        lies the same on all tensor-parallel ranks or differs."""
        if not self.dropout or not self.training:
            return x
        with get_cuda_rng_tracker().fork(states):
            return F.dropout(x, self.dropout)

    def sharded_state_dict(self, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
        """Both factors for Megatron's checkpoints."""
        own = {"a": self.a, "b": self.b}
        replicas = metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            own, prefix, self.sharded_axes, offsets, tp_group=self.group, dp_cp_group=replicas
        )


class ColumnLora(Lora):
    """Beside a column-parallel layer: `a` is whole everywhere, `b` has the rank's rows."""

    sharded_axes = {"b": 0}
    partial: tuple[str, ...] = ("a",)

    def __init__(self, config: Any, place: LoraPlace, weight: Tensor, lora: LoraConfig) -> None:
        super().__init__(config, place, weight, lora)
        picks = [torch.full((size,), place.pairs if pair is None else pair) for pair, size in place.rows]
        choice = F.one_hot(torch.cat(picks), place.pairs + 1)[:, : place.pairs]
        self.register_buffer("_owners", choice.to(weight.device, weight.dtype), persistent=False)

    def spread(self) -> Tensor:
        """`b` with each row in the columns of its own pair and zeros in the others: [out, pairs x rank]."""
        owners: Tensor = self.get_buffer("_owners")
        return (owners[:, :, None] * self.b[:, None, :]).flatten(1)

    def delta(self) -> Tensor:
        return self.scale * (self.spread().float() @ self.a.float())

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """x: [t, 1, in], a slice of the tokens under sequence parallelism; output: [T, 1, out / TP] of all of them."""
        own = self.config.sequence_parallel
        low = F.linear(self.dropped(x, _OWN if own else _SAME_EVERYWHERE), self.a)
        if own:
            low = gather_from_sequence_parallel_region(low, group=self.group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.group)
        return add_product(output, low, self.spread(), self.scale)

    def sharded_state_dict(self, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
        """Sections of `b` are tensors of their own, so that any tensor-parallel size can load them."""
        state = super().sharded_state_dict(prefix, offsets, metadata)
        sections = list(self.place.sections)
        if len(sections) > 1:
            names = [str(number) for number in range(len(sections))]
            state[prefix + "b"] = _split_tensor_factory(state[prefix + "b"], sections, names, 0)
        return state


class HeadLora(ColumnLora):
    """Beside the vocabulary-parallel head, whose logits `actor.head` computes from both."""

    partial = ()

    def low(self, hidden: Tensor) -> Tensor:
        """scale x a(hidden) of all tokens: [t, rank]."""
        return self.scale * F.linear(self.dropped(hidden, _SAME_EVERYWHERE), self.a)

    def sharded_state_dict(self, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
        return _padded_state(self, prefix, offsets, metadata)


class RowLora(Lora):
    """Beside a row-parallel layer: `a` has the rank's columns, `b` is whole everywhere."""

    sharded_axes = {"a": 1}
    partial = ("b",)

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """x: [T, 1, in / TP]; output: [t, 1, out], a slice of the tokens under sequence parallelism."""
        low = F.linear(self.dropped(x, _OWN), self.a)
        return add_product(output, self.reduced(low), self.b, self.scale)

    def reduced(self, low: Tensor) -> Tensor:
        """Sum over tensor-parallel ranks; of own tokens only under sequence parallelism."""
        if self.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return reduce_from_tensor_model_parallel_region(low, group=self.group)


class EmbeddingLora(RowLora):
    """Beside the vocabulary-parallel embedding: `a` [rank, vocabulary / TP], `b` [hidden, rank]."""

    def shapes(self, weight: Tensor, pairs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        vocabulary, hidden = weight.shape
        return (self.rank, vocabulary), (hidden, self.rank)

    def delta(self) -> Tensor:
        return super().delta().t()

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """x: int64 [1, T]; output: [1, T, h], or [t, 1, h] of own tokens under sequence parallelism."""
        columns = x.flatten() - self.group.rank() * self.a.shape[1]
        here = (columns >= 0) & (columns < self.a.shape[1])
        low = F.embedding(columns.clamp(0, self.a.shape[1] - 1), self.a.t()) * here[:, None].to(self.a.dtype)
        return add_product(output, self.reduced(low), self.b, self.scale)

    def sharded_state_dict(self, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
        return _padded_state(self, prefix, offsets, metadata)


class LoraColumnLinear(ColumnParallelLinear):
    """A column-parallel layer that may have an adapter, and a weight of 8 bits."""

    lora: ColumnLora | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_module("lora", None)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with used_whole(weight) as made:
            output: Tensor = super()._forward_impl(input, made, *args, **kwargs)
        return output

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.tp_group.size() == 1 and not args and not kwargs:
            kept = self.bias if self.skip_bias_add else None
            output, bias = product(input_, self.weight, None if self.skip_bias_add else self.bias), kept
        else:
            output, bias = super().forward(input_, *args, **kwargs)
        return (output if self.lora is None else self.lora.add_to(output, input_)), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return with_adapter(state, self.lora, prefix, sharded_offsets, metadata)


class LoraRowLinear(RowParallelLinear):
    """A row-parallel layer that may have an adapter, and a weight of 8 bits."""

    lora: RowLora | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_module("lora", None)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return product(input, weight)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.tp_group.size() == 1 and self.bias is None:
            output, bias = product(input_, self.weight), None
        else:
            output, bias = super().forward(input_)
        return (output if self.lora is None else self.lora.add_to(output, input_)), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return with_adapter(state, self.lora, prefix, sharded_offsets, metadata)


class LoraEmbedding(VocabParallelEmbedding):
    """The vocabulary-parallel embedding with an adapter; Megatron's own becomes one of this class."""

    lora: EmbeddingLora

    def forward(self, input_: Tensor) -> Tensor:
        return self.lora.add_to(super().forward(input_), input_)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return with_adapter(state, self.lora, prefix, sharded_offsets, metadata)


def with_adapter(
    state: dict[str, Any], lora: Lora | None, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]
) -> dict[str, Any]:
    """A layer's sharded state, in which Megatron sees the adapter's factors as whole tensors, put right."""
    if lora is None:
        return state
    inside = f"{prefix}lora."
    own = {name: entry for name, entry in state.items() if not name.startswith(inside)}
    return own | lora.sharded_state_dict(inside, offsets, metadata)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight transposed + bias, where no tensor rank has another part of it; `weight` may be packed. Megatron's own
    linear layer makes the same products here, in three times as many steps of the host."""
    with used_whole(weight) as made:
        return F.linear(x, made, bias)


def add_product(output: Tensor, low: Tensor, b: Tensor, scale: float) -> Tensor:
    """output + scale x low @ b transposed, in one product."""
    added = torch.addmm(output.flatten(0, -2), low.flatten(0, -2), b.t(), alpha=scale)
    return added.view(output.shape)


def _padded_state(lora: Lora, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
    """Where the vocabulary is padded to a multiple of the ranks."""
    state = Lora.sharded_state_dict(lora, prefix, offsets, metadata)
    for name, axis in lora.sharded_axes.items():
        state[prefix + name] = make_tp_sharded_tensor_for_checkpoint(
            cast(Tensor, getattr(lora, name)),
            prefix + name,
            tp_axis=axis,
            allow_shape_mismatch=True,
            prepend_offsets=offsets,
            tp_group=lora.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
    return state
