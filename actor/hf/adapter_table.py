"""Which weights have a LoRA adapter, and how its two factors are named, cut and laid out. Pure: imports no torch.

An adapter adds `scale x b @ a` to a weight. The rows of `a` and `b` follow the weight's own entry of the weight table,
so that a weight which holds several Hugging Face tensors (q, k and v; gate and up) has a pair of factors for each of
them, and tensor and expert parallelism cut factors as they cut the weight. Names and shapes outside are PEFT's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from actor.hf.weight_table import PADDING, Entry, Piece, Source, weight_table
from rlpipe.config.lora import LoraConfig
from rlpipe.model.description import TrainableModel
from rlpipe.shared.errors import ActorError
from rlpipe.shared.weights import ADAPTER_ROOT

Kind = Literal["column", "row", "embedding", "head", "experts", "shared_experts"]

ALL_LINEAR = "all-linear"
_KINDS: dict[str, Kind] = {
    "word_embeddings.weight": "embedding",
    "output_layer.weight": "head",
    "linear_qkv.weight": "column",
    "linear_proj.weight": "row",
    "linear_fc1.weight": "column",
    "linear_fc2.weight": "row",
    "in_proj.weight": "column",
    "out_proj.weight": "row",
    "experts.weight1": "experts",
    "experts.weight2": "experts",
}


_FEED_FORWARD = (".gate_proj", ".up_proj", ".down_proj")
_MOVED_NAMES = {"Qwen3MoeForCausalLM": _FEED_FORWARD, "Qwen3NextForCausalLM": _FEED_FORWARD}
"""By architecture, modules that PEFT takes for routed experts whatever stands before their names
(transformers_weight_conversion.py, 0.21); it finds the same layers by the names of their weights."""


@dataclass(frozen=True)
class AdaptedWeight:
    """A frozen weight and the entries of the two factors that are trained in its place.

    slots: of each Hugging Face tensor in `weight`, the number of its pair of factors; None where it has none.
    a: those pairs' first factors, one above the other. b: their second factors, in the rows of the weight.
    """

    weight: Entry
    kind: Kind
    slots: tuple[int | None, ...]
    a: Entry
    b: Entry

    @property
    def module(self) -> str:
        """Name of the submodule that holds the factors, beside the weight: lora, lora1, lora2."""
        return "lora" + self.weight.target.rsplit(".weight", 1)[1]

    @property
    def parameters(self) -> int:
        """Elements of both factors."""
        return factor_elements(self.a) + factor_elements(self.b)


def factor_elements(factor: Entry) -> int:
    """Trained elements of a factor, padding and rows of what is not adapted not counted."""
    pieces = (piece for section in factor.sections for piece in section if piece.source != PADDING)
    return sum(
        piece.size * prod(size for axis, size in enumerate(factor.sources[piece.source].shape) if axis != factor.axis)
        for piece in pieces
    )


def adapter_table(model: TrainableModel, lora: LoraConfig, *, padded_vocab_size: int) -> list[AdaptedWeight]:
    """All adapters of the model in the order of the weight table.

    Raises:
        ActorError: a target matches nothing, or what cannot be adapted by itself.
    """
    weights = adaptable_weights(model, lora, padded_vocab_size=padded_vocab_size)
    _check_targets(model, lora, [_module_name(source) for entry, _ in weights for source in entry.sources])
    found = []
    for entry, kind in weights:
        chosen = [_is_target(_module_name(source), kind, lora.targets) for source in entry.sources]
        if any(chosen):
            numbers = iter(range(len(chosen)))
            slots = tuple(next(numbers) if one else None for one in chosen)
            found.append(_adapted(entry, kind, slots, lora))
    return found


def adaptable_weights(model: TrainableModel, lora: LoraConfig, *, padded_vocab_size: int) -> list[tuple[Entry, Kind]]:
    """What `lora.targets` may name."""
    table = weight_table(replace(model, fused_experts=True), padded_vocab_size=padded_vocab_size, with_mtp=False)
    kinds = ((entry, _kind(model, entry, lora)) for entry in table)
    return [(entry, kind) for entry, kind in kinds if kind is not None]


def peft_targets(
    model: TrainableModel, table: Sequence[AdaptedWeight], adaptable: Sequence[Entry]
) -> tuple[list[str], list[str]]:
    """`target_modules` and `target_parameters` of an adapter_config.json, short where every weight of a short name is
    adapted. adaptable: of `adaptable_weights`."""
    everything = [_module_name(source) for entry in adaptable for source in entry.sources]
    modules: set[str] = set()
    weights: set[str] = set()
    parameters: set[str] = set()
    for adapted in table:
        for source, slot in zip(adapted.weight.sources, adapted.slots, strict=True):
            name = _module_name(source)
            if slot is not None and adapted.kind in ("experts", "shared_experts"):
                parameters.add(name)
            elif slot is not None:
                moved = model.architecture in _MOVED_NAMES and name.endswith(_MOVED_NAMES[model.architecture])
                (weights if moved else modules).add(name)
    tensors = [f"{name}.weight" for name in _shortened(weights, everything, 3)]
    return _shortened(modules, everything, 1), _shortened(parameters, everything, 3) + tensors


def _shortened(chosen: set[str], everything: Sequence[str], components: int) -> list[str]:
    short = {name: ".".join(name.split(".")[-components:]) for name in chosen}
    left_out = [name for name in everything if name not in chosen]
    whole = {one for one in short.values() if not any(_matches(name, one) for name in left_out)}
    return sorted({short[name] if short[name] in whole else name for name in chosen})


def _kind(model: TrainableModel, entry: Entry, lora: LoraConfig) -> Kind | None:
    kind = next((kind for ending, kind in _KINDS.items() if entry.target.endswith(ending)), None)
    if kind in ("embedding", "head") and model.tied_embeddings:
        return None
    if kind == "experts":
        kinds: dict[str, Kind | None] = {"none": None, "each": "experts", "shared": "shared_experts"}
        return kinds[lora.experts]
    return kind


def _module_name(source: Source) -> str:
    return source.name.removesuffix(".weight")


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _halves(name: str) -> tuple[str, ...]:
    """Routed experts keep gate and up in one tensor, which both of their usual names mean together."""
    joint = "gate_up_proj"
    return tuple(name.removesuffix(joint) + half for half in ("gate_proj", "up_proj")) if name.endswith(joint) else ()


def _is_target(name: str, kind: Kind, targets: Sequence[str]) -> bool:
    if ALL_LINEAR in targets and kind not in ("embedding", "head"):
        return True
    halves = _halves(name)
    return any(_matches(name, target) for target in targets) or (
        bool(halves) and all(any(_matches(half, target) for target in targets) for half in halves)
    )


def _check_targets(model: TrainableModel, lora: LoraConfig, names: Sequence[str]) -> None:
    for target in lora.targets:
        if target == ALL_LINEAR:
            continue
        if not any(_matches(name, target) for whole in names for name in (whole, *_halves(whole))):
            raise ActorError(
                f"actor.lora.targets has {target!r}, which no adaptable weight of {model.architecture} is called"
                f"{_hint(model, lora, target)}: it has {', '.join(sorted({name.rsplit('.', 1)[-1] for name in names}))}"
            )
    for name in names:
        named = [any(_matches(half, target) for target in lora.targets) for half in _halves(name)]
        if any(named) and not all(named) and not _is_target(name, "experts", lora.targets):
            raise ActorError(
                f"actor.lora.targets has one of gate_proj and up_proj, which are one tensor in {name}: name both, or "
                "set actor.lora.experts to none"
            )


def _hint(model: TrainableModel, lora: LoraConfig, target: str) -> str:
    if model.tied_embeddings and target.rsplit(".", 1)[-1] in ("embed_tokens", "lm_head"):
        return " (embedding and head are one weight here, and an adapter of one of them could not be merged)"
    routed = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
    if model.experts is not None and lora.experts == "none" and target.rsplit(".", 1)[-1] in routed:
        return " (for routed experts set actor.lora.experts)"
    return ""


def _adapted(weight: Entry, kind: Kind, slots: tuple[int | None, ...], lora: LoraConfig) -> AdaptedWeight:
    if kind in ("experts", "shared_experts"):
        a, b = (_experts if kind == "experts" else _shared_experts)(weight, lora)
    else:
        a, b = {"row": _row, "embedding": _embedding}.get(kind, _column)(weight, slots, lora.rank)
    place, ending = weight.target.rsplit(".weight", 1)
    target = f"{place}.lora{ending}."
    return AdaptedWeight(weight, kind, slots, replace(a, target=target + "a"), replace(b, target=target + "b"))


def _factor(like: Entry, sources: Sequence[Source], axis: int, sections: Sequence[Sequence[Piece]]) -> Entry:
    """A factor that is cut as `like` is."""
    return replace(like, sources=tuple(sources), axis=axis, sections=tuple(tuple(part) for part in sections))


def _whole(like: Entry, sources: Sequence[Source]) -> Entry:
    """A factor that every rank has as a whole."""
    pieces = [Piece(number, 0, source.shape[0]) for number, source in enumerate(sources)]
    return replace(_factor(like, sources, 0, [pieces]), split="replicated")


def _named(source: Source, factor: str, shape: tuple[int, ...]) -> Source:
    return Source(f"{ADAPTER_ROOT}{_module_name(source)}.{factor}", shape)


def _column(weight: Entry, slots: tuple[int | None, ...], rank: int) -> tuple[Entry, Entry]:
    adapted = [source for source, slot in zip(weight.sources, slots, strict=True) if slot is not None]
    first = [_named(source, "lora_A.weight", (rank, source.shape[1])) for source in adapted]
    second = [_named(source, "lora_B.weight", (source.shape[0], rank)) for source in adapted]
    sections = [list(_renumbered(section, slots)) for section in weight.sections]
    return _whole(weight, first), _factor(weight, second, 0, sections)


def _renumbered(section: Sequence[Piece], slots: tuple[int | None, ...]) -> Iterator[Piece]:
    """Rows of tensors without an adapter are zero."""
    for piece in section:
        slot = None if piece.source == PADDING else slots[piece.source]
        yield Piece(PADDING, 0, piece.size) if slot is None else replace(piece, source=slot)


def _row(weight: Entry, _: tuple[int | None, ...], rank: int) -> tuple[Entry, Entry]:
    (source,) = weight.sources
    rows, columns = source.shape
    first = _factor(weight, [_named(source, "lora_A.weight", (rank, columns))], 1, weight.sections)
    return first, _whole(weight, [_named(source, "lora_B.weight", (rows, rank))])


def _embedding(weight: Entry, _: tuple[int | None, ...], rank: int) -> tuple[Entry, Entry]:
    (source,) = weight.sources
    vocabulary, hidden = source.shape
    first = _factor(weight, [_named(source, "lora_embedding_A", (rank, vocabulary))], 1, weight.sections)
    return first, _whole(weight, [_named(source, "lora_embedding_B", (hidden, rank))])


def _experts(weight: Entry, lora: LoraConfig) -> tuple[Entry, Entry]:
    """PEFT's layout (`ParamWrapper`): a is [experts x rank, in], b is [out, rank x experts], the expert innermost."""
    (source,), rank = weight.sources, lora.rank
    experts, out, wide = source.shape
    rows = [[Piece(0, 0, experts * rank)]]
    columns = [[Piece(0, number * experts, (number + 1) * experts)] for number in range(rank)]
    name = _experts_name(source, lora)
    first = _factor(weight, [Source(name + "lora_A.weight", (experts * rank, wide))], 0, rows)
    return first, _factor(weight, [Source(name + "lora_B.weight", (out, rank * experts))], 1, columns)


def _shared_experts(weight: Entry, lora: LoraConfig) -> tuple[Entry, Entry]:
    """PEFT knows no such adapter. Outside it is one for each expert, all of the same values: here is the first."""
    each_a, each_b = _experts(weight, lora)
    columns = [section[0].start for section in each_b.sections]
    first = replace(each_a, sections=((Piece(0, 0, lora.rank),),), split="replicated")
    second = replace(each_b, sections=(tuple(Piece(0, start, start + 1) for start in columns),), split="replicated")
    return first, second


def _experts_name(source: Source, lora: LoraConfig) -> str:
    """PEFT wraps the module of the experts once for each adapted tensor of it: the first one lies inside the second."""
    experts, tensor = source.name.rsplit(".", 1)
    nested = tensor == "gate_up_proj" and _is_target(experts + ".down_proj", "experts", lora.targets)
    return f"{ADAPTER_ROOT}{experts}.{'base_layer.' if nested else ''}"
