"""Which process of the actor sends which tensors to the engines, and in which order. Pure: it knows the layout and no
process, so all sides come to the same plan without a word between them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import TypeAlias

from actor.hf.adapter_table import AdaptedWeight
from actor.hf.engine_adapters import engine_factors
from actor.hf.weight_table import Entry, Layer
from rlpipe.config.layout import ActorLayout
from rlpipe.shared.quantization import specs_as_sent
from rlpipe.shared.weights import TensorSpec, WeightBucket, aligned, experts_part

_SMALLEST_SHARE_BYTES = 16 * 2**20
"""Smaller messages do not come near the speed of a link, however many processes send."""

Source: TypeAlias = Entry | AdaptedWeight


@dataclass(frozen=True)
class Portion:
    """Tensors that one process sends, all made of one parameter, or of the factors of one adapter.

    sender: its global rank.
    """

    source: Source
    sender: int
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Holders:
    """The processes that send: of each pipeline stage the first ones that hold all of its weights together. Other
    data-parallel replicas do not send: one more would be a group more that every engine has to join.

    layers: of the decoder.
    """

    layout: ActorLayout
    layers: int

    @property
    def senders(self) -> int:
        """How many there are."""
        return self._in_stage * self.layout.pipeline_parallel

    def of(self, source: Source) -> tuple[int, ...]:
        """Global ranks that can send `source`, each after a gather over its tensor-parallel group if it is cut."""
        entry = source if isinstance(source, Entry) else source.weight
        first = self._stage(entry.layer) * self.layout.processes // self.layout.pipeline_parallel
        return tuple(range(first, first + self._in_stage))

    def of_experts(self, source: Source, part: int) -> tuple[int, ...]:
        """Those of them that hold the experts of expert-parallel rank `part`."""
        return self.of(source)[part :: self.layout.expert_parallel]

    @property
    def _in_stage(self) -> int:
        tensor = self.layout.tensor_parallel
        return -(-max(tensor, self.layout.expert_parallel) // tensor) * tensor

    def _stage(self, layer: Layer) -> int:
        if isinstance(layer, int):
            return self.layout.stage(layer, self.layers)
        return 0 if layer == "first" else self.layout.pipeline_parallel - 1


def model_sources(
    entries: Iterable[Entry], dtype: str, quantization: str = "none"
) -> list[tuple[Source, tuple[TensorSpec, ...]]]:
    """Parameters with the Hugging Face tensors that are sent of them. quantization: of the engines."""
    return [
        (
            entry,
            tuple(
                sent
                for source in entry.sources
                for sent in specs_as_sent(TensorSpec(source.name, dtype, source.shape), quantization)
            ),
        )
        for entry in entries
    ]


def adapter_sources(
    table: Iterable[AdaptedWeight], rank: int, dtype: str
) -> list[tuple[Source, tuple[TensorSpec, ...]]]:
    """Adapters of inner width `rank` with the factors that engines take of them."""
    return [
        (one, tuple(TensorSpec(factor.name, dtype, factor.shape) for factor in engine_factors(one, rank)))
        for one in table
    ]


def portions_of(
    sources: Iterable[tuple[Source, Sequence[TensorSpec]]], holders: Holders | None, bucket_bytes: int
) -> tuple[Portion, ...]:
    """Every tensor of every source once, in their order.

    Routed experts are sent by the processes that have them, in tensors of no more than a bucket if an expert is not
    larger; everything else in shares that make the bytes of all processes of a stage about equal. holders: None where
    each process sends everything, and nothing is cut.
    """
    units = [(source, tuple(tensors)) for source, tensors in sources]
    if holders is None:
        return tuple(Portion(source, 0, tensors) for source, tensors in units)
    limit = share_of_bucket(bucket_bytes, holders)
    sent_bytes: dict[int, int] = defaultdict(int)
    found: dict[int, list[Portion]] = {}
    for number in sorted(
        range(len(units)), key=lambda index: (not _is_experts(units[index][0]), -_size(units[index][1]))
    ):
        source, tensors = units[number]
        found[number] = []
        for candidates, part in _parts(source, tensors, holders, limit):
            sender = min(candidates, key=lambda rank: (sent_bytes[rank], rank))
            sent_bytes[sender] += _size(part)
            found[number].append(Portion(source, sender, part))
    return tuple(chain.from_iterable(found[number] for number in range(len(units))))


def buckets_of(portions: Iterable[Portion], holders: Holders | None, bucket_bytes: int) -> tuple[WeightBucket, ...]:
    """The senders' buckets by turns. Each of n senders fills buckets of 1 / n of the bytes, so that as many bytes as
    with one are under way."""
    limit = share_of_bucket(bucket_bytes, holders)
    tensors: dict[int, list[TensorSpec]] = defaultdict(list)
    for portion in portions:
        tensors[portion.sender] += portion.tensors
    each = [plan_buckets(tensors[sender], limit, sender) for sender in sorted(tensors)]
    return tuple(bucket for turn in zip_longest(*each) for bucket in turn if bucket is not None)


def share_of_bucket(bucket_bytes: int, holders: Holders | None) -> int:
    """What a bucket of one sender may hold."""
    senders = 1 if holders is None else holders.senders
    return max(bucket_bytes // senders, min(bucket_bytes, _SMALLEST_SHARE_BYTES))


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int, sender: int = 0) -> tuple[WeightBucket, ...]:
    """Consecutive tensors, together at most `bucket_bytes`; a larger one gets a bucket of its own. Scales stay with
    what they are of, whether they fit or not."""
    buckets: list[WeightBucket] = []
    open_specs: list[TensorSpec] = []
    end_bytes = 0
    for spec in specs:
        if open_specs and not spec.is_scale and aligned(end_bytes) + spec.size_bytes > bucket_bytes:
            buckets.append(WeightBucket(tuple(open_specs), sender))
            open_specs, end_bytes = [], 0
        open_specs.append(spec)
        end_bytes = aligned(end_bytes) + spec.size_bytes
    if open_specs:
        buckets.append(WeightBucket(tuple(open_specs), sender))
    return tuple(buckets)


def _parts(
    source: Source, tensors: tuple[TensorSpec, ...], holders: Holders, limit_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[TensorSpec, ...]]]:
    """Tensors that have to be sent together, with the processes that can."""
    if not _is_experts(source):
        yield holders.of(source), tensors
        return
    experts = tensors[0].shape[0]
    held = experts // holders.layout.expert_parallel
    together = max(1, limit_bytes * experts // _size(tensors))
    for part in range(holders.layout.expert_parallel):
        cuts = [*range(part * held, (part + 1) * held, together), (part + 1) * held]
        yield (
            holders.of_experts(source, part),
            tuple(_experts_of(stacked, first, last) for first, last in pairwise(cuts) for stacked in tensors),
        )


def _experts_of(stacked: TensorSpec, first: int, last: int) -> TensorSpec:
    """Those from `first` to before `last`."""
    experts, *expert = stacked.shape
    if last - first == experts:
        return stacked
    return TensorSpec(experts_part(stacked.name, first, last - 1), stacked.dtype, (last - first, *expert))


def _is_experts(source: Source) -> bool:
    return isinstance(source, Entry) and source.split == "expert"


def _size(tensors: Iterable[TensorSpec]) -> int:
    """Bytes."""
    return sum(spec.size_bytes for spec in tensors)
