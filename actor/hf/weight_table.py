"""The one table between Hugging Face tensors and Megatron parameters, read in both directions.

Every parameter is a rearrangement of rows (or columns) of Hugging Face tensors: no arithmetic, so a round trip is
exact. A row of the table says which pieces of which tensors lie one after another along one axis, and into how many
sections they fall that tensor parallelism cuts separately (gate and up; q, k, v, z, b and a).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rlpipe.model.description import TrainableModel
from rlpipe.shared.weights import TensorSpec

Split = Literal["replicated", "tensor", "expert"]
Layer = int | Literal["first", "last", "mtp"]
PADDING = -1


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Indices `start` to `stop` of source number `source` along the entry's axis; source PADDING is zeros."""

    source: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter under its global name.

    layer: the decoder layer, "first" (embedding), "last" (final norm, head) or "mtp": tells the pipeline stage.
    copy_of: the parameter is a second copy (tied head, embedding of the multi-token-prediction stage) of that entry.
    """

    target: str
    sources: tuple[Source, ...]
    axis: int
    sections: tuple[tuple[Piece, ...], ...]
    split: Split
    layer: Layer
    copy_of: str | None = None

    def shard(self, rank: int, size: int) -> Iterator[Piece]:
        """The pieces of one rank of `size`, in its order."""
        if self.split == "replicated":
            rank, size = 0, 1
        for section in self.sections:
            part = sum(piece.size for piece in section) // size
            yield from _cut(section, rank * part, (rank + 1) * part)


def _cut(pieces: tuple[Piece, ...], start: int, stop: int) -> Iterator[Piece]:
    position = 0
    for piece in pieces:
        low, high = max(start - position, 0), min(stop - position, piece.size)
        if low < high:
            yield Piece(piece.source, piece.start + low, piece.start + high)
        position += piece.size


def weight_table(model: TrainableModel, *, padded_vocab_size: int, with_mtp: bool) -> list[Entry]:
    """All parameters of the model in the order of export.

    Where `model.fused_experts`, experts are stored as `experts.gate_up_proj` [E, 2 x width, h] and
    `experts.down_proj` [E, h, width] instead of one set of matrices per expert.
    """
    root = model.weight_prefix
    embedding = _vocabulary(model, "embedding.word_embeddings.weight", root + "embed_tokens.weight", padded_vocab_size)
    entries = [embedding]
    for index in range(model.layers):
        entries += _layer(model, index)
    entries.append(_whole("decoder.final_layernorm.weight", root + "norm.weight", (model.hidden_size,), "last"))
    if model.tied_embeddings:
        entries.append(_copy(embedding, "output_layer.weight", "last"))
    else:
        entries.append(_vocabulary(model, "output_layer.weight", "lm_head.weight", padded_vocab_size, "last"))
    if with_mtp:
        entries += _mtp(model)
        entries.append(_copy(embedding, "embedding.word_embeddings.weight", "mtp"))
    return entries


def _whole(target: str, name: str, shape: tuple[int, ...], layer: Layer) -> Entry:
    return Entry(target, (Source(name, shape),), 0, ((Piece(0, 0, shape[0]),),), "replicated", layer)


def _split(
    target: str, name: str, shape: tuple[int, ...], layer: Layer, axis: int = 0, sections: tuple[int, ...] = ()
) -> Entry:
    """One tensor cut over TP along `axis`, in `sections` of these sizes."""
    pieces, start = [], 0
    for size in sections or (shape[axis],):
        pieces.append((Piece(0, start, start + size),))
        start += size
    return Entry(target, (Source(name, shape),), axis, tuple(pieces), "tensor", layer)


def _stack(target: str, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], layer: Layer) -> Entry:
    """Several tensors one after another along dimension 0, each cut over TP separately."""
    sources = tuple(Source(name, shape) for name, shape in zip(names, shapes, strict=True))
    sections = tuple((Piece(i, 0, shape[0]),) for i, shape in enumerate(shapes))
    return Entry(target, sources, 0, sections, "tensor", layer)


def _vocabulary(model: TrainableModel, target: str, name: str, padded: int, layer: Layer = "first") -> Entry:
    real = model.vocab_size
    pieces = (Piece(0, 0, real), Piece(PADDING, 0, padded - real))
    return Entry(target, (Source(name, (real, model.hidden_size)),), 0, (pieces,), "tensor", layer)


def _copy(entry: Entry, target: str, layer: Layer) -> Entry:
    return Entry(target, entry.sources, entry.axis, entry.sections, entry.split, layer, copy_of=entry.target)


def _layer(model: TrainableModel, index: int) -> list[Entry]:
    target, name = f"decoder.layers.{index}.", f"{model.weight_prefix}layers.{index}."
    attention = _attention if model.layer_kinds[index] == "full_attention" else _gated_delta_net
    mlp = _expert_mlp(model.fused_experts) if model.expert_layers[index] else _dense_mlp
    norm = (model.hidden_size,)
    return [
        _whole(target + "input_layernorm.weight", name + "input_layernorm.weight", norm, index),
        *attention(model, target + "self_attention.", name, index),
        _whole(target + "pre_mlp_layernorm.weight", name + "post_attention_layernorm.weight", norm, index),
        *mlp(model, target + "mlp.", name + "mlp.", index),
    ]


def _mtp(model: TrainableModel) -> list[Entry]:
    """Multi-token prediction as in Qwen3-Next and Qwen3.5: one set of norms and projection, `mtp.layers.*` above."""
    hidden = model.hidden_size
    target, name = "mtp.layers.0.", "mtp.layers.0."
    inner = target + "transformer_layer."
    mlp = _expert_mlp(model.fused_mtp_experts) if model.experts is not None else _dense_mlp
    return [
        _whole(target + "enorm.weight", "mtp.pre_fc_norm_embedding.weight", (hidden,), "mtp"),
        _whole(target + "hnorm.weight", "mtp.pre_fc_norm_hidden.weight", (hidden,), "mtp"),
        _split(target + "eh_proj.weight", "mtp.fc.weight", (hidden, 2 * hidden), "mtp"),
        _whole(inner + "input_layernorm.weight", name + "input_layernorm.weight", (hidden,), "mtp"),
        *_attention(model, inner + "self_attention.", name, "mtp"),
        _whole(inner + "pre_mlp_layernorm.weight", name + "post_attention_layernorm.weight", (hidden,), "mtp"),
        *mlp(model, inner + "mlp.", name + "mlp.", "mtp"),
        _whole(target + "final_layernorm.weight", "mtp.norm.weight", (hidden,), "mtp"),
    ]


def _attention(model: TrainableModel, target: str, name: str, layer: Layer) -> list[Entry]:
    hidden, width = model.hidden_size, model.heads * model.head_dim
    entries = [_query_key_value(model, target, name, "weight", (hidden,), layer)]
    if model.qkv_bias:
        entries.append(_query_key_value(model, target, name, "bias", (), layer))
    if model.qk_norm:
        entries += [
            _whole(f"{target}{x}_layernorm.weight", f"{name}self_attn.{x}_norm.weight", (model.head_dim,), layer)
            for x in "qk"
        ]
    entries.append(_split(target + "linear_proj.weight", name + "self_attn.o_proj.weight", (hidden, width), layer, 1))
    return entries


def _query_key_value(
    model: TrainableModel, target: str, name: str, kind: str, tail: tuple[int, ...], layer: Layer
) -> Entry:
    """Per key/value head: its query heads, their gates (stored as q|gate per head), the key head, the value head."""
    dim, per_group = model.head_dim, model.heads // model.kv_heads
    parts = 2 if model.attention_output_gate else 1
    pieces = []
    for group in range(model.kv_heads):
        heads = range(group * per_group, (group + 1) * per_group)
        for part in range(parts):
            pieces += [Piece(0, (head * parts + part) * dim, (head * parts + part + 1) * dim) for head in heads]
        pieces += [Piece(source, group * dim, (group + 1) * dim) for source in (1, 2)]
    sizes = (model.heads * parts * dim, model.kv_heads * dim, model.kv_heads * dim)
    sources = tuple(
        Source(f"{name}self_attn.{x}_proj.{kind}", (size, *tail)) for x, size in zip("qkv", sizes, strict=True)
    )
    return Entry(f"{target}linear_qkv.{kind}", sources, 0, (tuple(pieces),), "tensor", layer)


def _dense_mlp(model: TrainableModel, target: str, name: str, layer: Layer) -> list[Entry]:
    return _swiglu(target, name, model.mlp_width, model.hidden_size, layer)


def _swiglu(target: str, name: str, width: int, hidden: int, layer: Layer) -> list[Entry]:
    names = (name + "gate_proj.weight", name + "up_proj.weight")
    return [
        _stack(target + "linear_fc1.weight", names, ((width, hidden),) * 2, layer),
        _split(target + "linear_fc2.weight", name + "down_proj.weight", (hidden, width), layer, 1),
    ]


def _expert_mlp(fused: bool) -> Callable[..., list[Entry]]:
    def entries(model: TrainableModel, target: str, name: str, layer: Layer) -> list[Entry]:
        assert model.experts is not None
        sizes, hidden = model.experts, model.hidden_size
        routed = (_fused_experts if fused else _separate_experts)(model, target + "experts.", name + "experts.", layer)
        rows = [_whole(target + "router.weight", name + "gate.weight", (sizes.experts, hidden), layer), *routed]
        if sizes.shared_width:
            shared = target + "shared_experts."
            rows += _swiglu(shared, name + "shared_expert.", sizes.shared_width, hidden, layer)
            rows.append(_whole(shared + "gate_weight", name + "shared_expert_gate.weight", (1, hidden), layer))
        return rows

    return entries


def _fused_experts(model: TrainableModel, target: str, name: str, layer: Layer) -> list[Entry]:
    assert model.experts is not None
    count, width, hidden = model.experts.experts, model.experts.width, model.hidden_size
    tensors = (
        ("weight1", "gate_up_proj", (count, 2 * width, hidden)),
        ("weight2", "down_proj", (count, hidden, width)),
    )
    return [
        Entry(target + own, (Source(name + theirs, shape),), 0, ((Piece(0, 0, count),),), "expert", layer)
        for own, theirs, shape in tensors
    ]


def _separate_experts(model: TrainableModel, target: str, name: str, layer: Layer) -> list[Entry]:
    """[E, 2 x width, h] is the rows of gate 0, up 0, gate 1, up 1, ... seen as three dimensions."""
    assert model.experts is not None
    count, width, hidden = model.experts.experts, model.experts.width, model.hidden_size
    halves = [f"{name}{expert}.{half}_proj.weight" for expert in range(count) for half in ("gate", "up")]
    downs = [f"{name}{expert}.down_proj.weight" for expert in range(count)]
    entries = []
    for own, names, shape in (("weight1", halves, (width, hidden)), ("weight2", downs, (hidden, width))):
        sources = tuple(Source(tensor, shape) for tensor in names)
        pieces = tuple(Piece(i, 0, shape[0]) for i in range(len(names)))
        entries.append(Entry(target + own, sources, 0, (pieces,), "expert", layer))
    return entries


def _gated_delta_net(model: TrainableModel, target: str, name: str, layer: Layer) -> list[Entry]:
    sizes = model.gated_delta_net
    assert sizes is not None
    name += "linear_attn."
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    channels = (keys, keys, values)
    project = _interleaved_projections if sizes.fused_projections else _separate_projections
    return [
        project(model, target + "in_proj.weight", name, layer),
        _split(
            target + "conv1d.weight", name + "conv1d.weight", (sum(channels), 1, sizes.conv_width), layer, 0, channels
        ),
        _split(target + "dt_bias", name + "dt_bias", (sizes.value_heads,), layer),
        _split(target + "A_log", name + "A_log", (sizes.value_heads,), layer),
        _whole(target + "out_norm.weight", name + "norm.weight", (sizes.value_dim,), layer),
        _split(target + "out_proj.weight", name + "out_proj.weight", (model.hidden_size, values), layer, 1),
    ]


def _separate_projections(model: TrainableModel, target: str, name: str, layer: Layer) -> Entry:
    """Qwen3.5: in_proj_qkv (q, k, v one after another), in_proj_z, in_proj_b, in_proj_a."""
    sizes, hidden = model.gated_delta_net, model.hidden_size
    assert sizes is not None
    keys, values, heads = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim, sizes.value_heads
    shapes = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    sources = tuple(Source(f"{name}in_proj_{key}.weight", (size, hidden)) for key, size in shapes.items())
    sections = (
        (Piece(0, 0, keys),),
        (Piece(0, keys, 2 * keys),),
        (Piece(0, 2 * keys, 2 * keys + values),),
        (Piece(1, 0, values),),
        (Piece(2, 0, heads),),
        (Piece(3, 0, heads),),
    )
    return Entry(target, sources, 0, sections, "tensor", layer)


def _interleaved_projections(model: TrainableModel, target: str, name: str, layer: Layer) -> Entry:
    """Qwen3-Next: in_proj_qkvz holds per key head q, k, its v heads, its z heads; in_proj_ba its b's and a's."""
    sizes, hidden = model.gated_delta_net, model.hidden_size
    assert sizes is not None
    share = sizes.value_heads // sizes.key_heads
    widths = (sizes.key_dim, sizes.key_dim, share * sizes.value_dim, share * sizes.value_dim)
    sections = []
    for source, parts in ((0, widths), (1, (share, share))):
        stride = sum(parts)
        for position, width in enumerate(parts):
            first = sum(parts[:position])
            heads = range(sizes.key_heads)
            sections.append(
                tuple(Piece(source, head * stride + first, head * stride + first + width) for head in heads)
            )
    sources = (
        Source(name + "in_proj_qkvz.weight", (sizes.key_heads * sum(widths), hidden)),
        Source(name + "in_proj_ba.weight", (2 * sizes.value_heads, hidden)),
    )
    return Entry(target, sources, 0, tuple(sections), "tensor", layer)


def export_plan(model: TrainableModel, dtype: str = "bfloat16", *, with_mtp: bool = False) -> tuple[TensorSpec, ...]:
    """What will stream out, without any weights: names, dtype and shapes of what `iter_export` yields,
    in its order. with_mtp: as given there."""
    table = weight_table(model, padded_vocab_size=model.vocab_size, with_mtp=with_mtp)
    sources = (source for entry in table if entry.copy_of is None for source in entry.sources)
    return tuple(TensorSpec(source.name, dtype, source.shape) for source in sources)
