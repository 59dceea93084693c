"""The plan of senders, a pure function of model and layout, for models of published sizes."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from actor.hf.adapter_table import adapter_table
from actor.hf.weight_table import weight_table
from actor.weight_plan import Holders, adapter_sources, buckets_of, model_sources, portions_of, share_of_bucket
from rlpipe.config.layout import ActorLayout
from rlpipe.config.lora import LoraConfig
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.project_files import MODELS
from rlpipe.shared.weights import StackedExperts, TensorSpec, WeightBucket, experts_part

BUCKET_BYTES = 512 * 2**20
MIXTURE, HYBRID, DENSE = "Qwen3-30B-A3B", "Qwen3.5-35B-A3B", "Qwen3-8B"


def layout(tensor: int = 1, pipeline: int = 1, expert: int = 1, data: int = 1, virtual: int | None = None):
    return ActorLayout(tensor * pipeline * data, tensor, pipeline, 1, expert, tensor > 1, virtual)


CASES = {
    "one process": (DENSE, layout(), "none"),
    "tp2": (DENSE, layout(tensor=2), "none"),
    "tp2, 8 bits": (DENSE, layout(tensor=2), "fp8_all"),
    "ep2": (MIXTURE, layout(expert=2, data=2), "none"),
    "tp2_ep8_pp2": (MIXTURE, layout(tensor=2, pipeline=2, expert=8, data=8), "none"),
    "tp2_ep8_pp2, 8 bits": (MIXTURE, layout(tensor=2, pipeline=2, expert=8, data=8), "fp8"),
    "tp4_ep2": (HYBRID, layout(tensor=4, expert=2, data=2), "none"),
    "ep4_pp2_vpp2_of_dp8": (HYBRID, layout(pipeline=2, expert=4, data=8, virtual=2), "none"),
    "ep4_pp2_vpp2_of_dp8, 8 bits": (HYBRID, layout(pipeline=2, expert=4, data=8, virtual=2), "fp8_all"),
}


@pytest.fixture(scope="module", params=CASES)
def planned(request):
    name, where, quantization = CASES[request.param]
    model = replace(trainable_model(MODELS / name), fused_experts=True)
    table = weight_table(model, padded_vocab_size=model.vocab_size, with_mtp=False)
    sources = model_sources((entry for entry in table if entry.copy_of is None), "bfloat16", quantization)
    holders = Holders(where, model.layers)
    portions = portions_of(sources, holders, BUCKET_BYTES)
    return model, sources, holders, portions, buckets_of(portions, holders, BUCKET_BYTES)


def test_every_number_is_sent_once(planned):
    _, sources, _, _, buckets = planned
    wanted = Counter({spec.name: spec.elements for _, tensors in sources for spec in tensors})
    sent = Counter()
    firsts = {}
    for spec in (spec for bucket in buckets for spec in bucket.tensors):
        stacked = StackedExperts.of_name(spec.name)
        name = spec.name if stacked is None else f"{stacked.root}.{stacked.kind}{stacked.ending}"
        sent[name] += spec.elements
        if stacked is not None:
            firsts.setdefault(name, []).append((stacked.first, spec.shape[0]))
    assert sent == wanted
    for parts in map(sorted, firsts.values()):  # side by side, without a gap
        assert all(first + count == following for (first, count), (following, _) in pairwise(parts))


def test_senders_hold_what_they_send(planned):
    model, _, holders, portions, _ = planned
    where = holders.layout
    stage_size = where.processes // where.pipeline_parallel
    for portion in portions:
        stage, place = divmod(portion.sender, stage_size)
        assert place < max(where.tensor_parallel, where.expert_parallel)  # one copy of the weights sends
        layer = portion.source.layer
        if isinstance(layer, int):
            per_chunk = model.layers // (where.pipeline_parallel * (where.virtual_pipeline or 1))
            assert layer // per_chunk % where.pipeline_parallel == stage
        else:
            assert stage == (0 if layer == "first" else where.pipeline_parallel - 1)
        if portion.source.split == "expert":
            held = model.experts.experts // where.expert_parallel
            for spec in portion.tensors:
                first = StackedExperts.of_name(spec.name).first
                assert first // held == (first + spec.shape[0] - 1) // held == place % where.expert_parallel


def test_processes_of_a_stage_send_about_as_much(planned):
    _, _, holders, portions, _ = planned
    where, sent, largest = holders.layout, Counter(), Counter()
    stage_size = where.processes // where.pipeline_parallel
    for portion in portions:
        size = sum(spec.size_bytes for spec in portion.tensors)
        stage = portion.sender // stage_size
        sent[portion.sender] += size
        largest[stage] = max(largest[stage], size if portion.source.split != "expert" else 0)
    for stage in range(where.pipeline_parallel):
        bytes_of = [size for sender, size in sent.items() if sender // stage_size == stage]
        assert len(bytes_of) == max(where.tensor_parallel, where.expert_parallel)
        assert max(bytes_of) - min(bytes_of) <= largest[stage]
    assert len(sent) == holders.senders


def test_buckets_come_by_turns_and_are_as_small_as_many_senders_ask(planned):
    _, _, holders, portions, buckets = planned
    limit = max(BUCKET_BYTES // holders.senders, 16 * 2**20)
    for bucket in buckets:
        weights = [spec for spec in bucket.tensors if not spec.is_scale]
        assert sum(spec.size_bytes for spec in weights) <= limit or len(weights) == 1
        sizes = [spec.elements * getattr(torch, spec.dtype).itemsize for spec in bucket.tensors]
        assert sum(sizes) <= bucket.size_bytes < sum(sizes) + 16 * len(sizes)
    begin = [bucket.sender for bucket in buckets[: holders.senders]]
    assert begin == sorted({portion.sender for portion in portions})
    for sender in begin:
        own = [spec for bucket in buckets if bucket.sender == sender for spec in bucket.tensors]
        assert own == [spec for portion in portions if portion.sender == sender for spec in portion.tensors]


def test_small_buckets_are_not_shared_and_an_expert_that_is_larger_goes_alone():
    holders = Holders(layout(tensor=2, pipeline=2, expert=8, data=8), 48)
    mebibytes = [share_of_bucket(size * 2**20, holders) / 2**20 for size in (1, 64, 16 * holders.senders * 2)]
    assert mebibytes == [1, 16, 32]
    assert share_of_bucket(BUCKET_BYTES, None) == BUCKET_BYTES
    model = replace(trainable_model(MODELS / MIXTURE), fused_experts=True)
    sources = model_sources(weight_table(model, padded_vocab_size=model.vocab_size, with_mtp=False), "bfloat16")
    specs = [spec for portion in portions_of(sources, holders, 2**20) for spec in portion.tensors]
    assert {spec.shape[0] for spec in specs if StackedExperts.of_name(spec.name) is not None} == {1}


def test_what_has_8_bits_comes_with_its_scales_in_half_the_bytes(planned):
    _, sources, _, _, buckets = planned
    for bucket in buckets:
        pairs = [*pairwise(bucket.tensors), (bucket.tensors[-1], TensorSpec("", "bfloat16", ()))]
        assert not bucket.tensors[0].is_scale
        for weight, following in pairs:
            if weight.dtype == "float8_e4m3fn":
                assert following.name == f"{weight.name}_scale_inv" and following.dtype == "float32"
                assert following.shape == (*weight.shape[:-2], *(-(-size // 128) for size in weight.shape[-2:]))
                assert weight.size_bytes == weight.elements
            else:
                assert not following.is_scale
    assert Counter(spec.dtype for bucket in buckets for spec in bucket.tensors)["float32"] == sum(
        spec.dtype == "float8_e4m3fn" for bucket in buckets for spec in bucket.tensors
    )


def test_tensors_of_any_types_lie_in_a_bucket_side_by_side_where_kernels_can_read_them():
    specs = [("a", "bfloat16", (3,)), ("b", "float8_e4m3fn", (5, 7)), ("c", "float32", (2,)), ("d", "bfloat16", ())]
    bucket = WeightBucket(tuple(TensorSpec(*spec) for spec in specs))
    flat = torch.zeros(bucket.size_bytes, dtype=torch.uint8)
    for number, piece in enumerate(bucket.pieces(flat), 1):
        assert piece.data_ptr() % 16 == flat.data_ptr() % 16
        piece.fill_(number)
    assert [
        (piece.dtype, tuple(piece.shape), set(piece.float().flatten().tolist())) for piece in bucket.pieces(flat)
    ] == [(getattr(torch, dtype), shape, {number}) for number, (_, dtype, shape) in enumerate(specs, 1)]
    assert bucket.size_bytes == 16 + 48 + 16 + 2 and bucket.has_gaps
    assert not WeightBucket((TensorSpec("a", "bfloat16", (8,)), TensorSpec("b", "float32", (1,)))).has_gaps


def test_shared_buffers_take_whole_tensors_in_the_order_of_the_table():
    model = replace(trainable_model(MODELS / MIXTURE), fused_experts=True)
    table = weight_table(model, padded_vocab_size=model.vocab_size, with_mtp=False)
    sources = model_sources(table, "bfloat16")
    buckets = buckets_of(portions_of(sources, None, BUCKET_BYTES), None, BUCKET_BYTES)
    assert [spec for bucket in buckets for spec in bucket.tensors] == [spec for _, both in sources for spec in both]


def test_factors_of_an_adapter_go_together_from_its_stage():
    model = trainable_model(MODELS / DENSE)
    lora = LoraConfig(rank=8, targets=["all-linear"])
    table = adapter_table(model, lora, padded_vocab_size=model.vocab_size)
    sources, holders = adapter_sources(table, lora.rank, "bfloat16"), Holders(layout(2, 2), model.layers)
    portions = portions_of(sources, holders, BUCKET_BYTES)
    assert [portion.tensors for portion in portions] == [tensors for _, tensors in sources]
    assert all(portion.sender // 2 == portion.source.weight.layer // (model.layers // 2) for portion in portions)
    assert {portion.sender for portion in portions} == {0, 1, 2, 3}


def test_a_part_of_the_experts_tells_by_its_name_which():
    name = "model.layers.3.mlp.experts.gate_up_proj"
    part = experts_part(name, 64, 127)
    assert part == "model.layers.3.mlp.experts.64-127.gate_up_proj"
    assert StackedExperts.of_name(part) == StackedExperts("model.layers.3.mlp.experts", 64, "gate_up_proj")
    assert StackedExperts.of_name(part + "_scale_inv").ending == "_scale_inv"
    assert StackedExperts.of_name(name).first == 0
    for other in ("model.layers.3.mlp.experts.7.gate_proj.weight", "model.layers.3.mlp.gate.weight", name + "_bias"):
        assert StackedExperts.of_name(other) is None
