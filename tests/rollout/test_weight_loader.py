"""What SGLang's loader did once is repeated without it, where it only copied; all else goes through it every time."""

from types import SimpleNamespace

import pytest
import torch

from rlpipe.shared.errors import RolloutError
from rlpipe.shared.weights import TensorSpec, WeightBucket, experts_part
from rollout.weights import block_fp8
from rollout.weights.block_fp8 import is_quantized, is_quantized_module, quantize_blocks, quantized
from rollout.weights.loader import WeightLoader
from rollout.weights.receiver import _Update

ROOT = "model.layers.0.mlp.experts"


class Model(torch.nn.Module):
    """Keeps parameters and remembers which names its loader was asked for."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(tensor))
        self.loaded: list[str] = []

    def load_weights(self, tensors) -> None:
        for name, tensor in tensors:
            self.loaded.append(name)
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        raise NotImplementedError


class Experts(Model):
    """Three experts as SGLang's loader fills them: gate before up, or up before gate as some of its kernels want it."""

    def __init__(self, up_first: bool) -> None:
        super().__init__(w13_weight=torch.zeros(3, 4, 5), w2_weight=torch.zeros(3, 5, 2))
        self.up_first = up_first

    def load(self, name: str, tensor: torch.Tensor) -> None:
        expert, kind = name.removeprefix(f"{ROOT}.").split(".")[:2]
        if kind == "down_proj":
            self.w2_weight[int(expert)] = tensor
        else:
            second = (kind == "up_proj") != self.up_first
            self.w13_weight.data[int(expert)].narrow(0, 2 if second else 0, 2).copy_(tensor)


class Shard(Model):
    """The second half of the rows of q and v, one after the other in a fused parameter of another data type."""

    def __init__(self) -> None:
        super().__init__(qv=torch.zeros(4, 3, dtype=torch.bfloat16))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        place = 0 if name == "q" else 2
        self.qv.data.narrow(0, place, 2).copy_(tensor.chunk(2)[1])


class Transforming(Model):
    """`a` is stored as -exp(a), `b` as it comes, `c` times two."""

    def __init__(self) -> None:
        super().__init__(a=torch.zeros(3), b=torch.zeros(3), c=torch.zeros(3))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "c":
            tensor = tensor + tensor
        parameter = getattr(self, name)
        parameter.data.copy_(-tensor.exp() if name == "a" else tensor)


class Deriving(Model):
    """Computes `twice` of `b` after every call of the loader, whatever it has loaded."""

    def __init__(self) -> None:
        super().__init__(b=torch.zeros(3), c=torch.zeros(3))
        self.register_buffer("twice", torch.zeros(3))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        getattr(self, name).data.copy_(tensor)

    def load_weights(self, tensors) -> None:
        super().load_weights(tensors)
        torch.mul(self.b.data, 2, out=self.twice)


def bucket(**shapes: tuple[int, ...]) -> list[tuple[str, torch.Tensor]]:
    """Views of one flat tensor, as they arrive."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    pieces = torch.randn(sum(sizes)).split(sizes)
    return [(name, piece.view(shape)) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)]


def stacked() -> list[tuple[str, torch.Tensor]]:
    return bucket(**{f"{ROOT}.gate_up_proj": (3, 4, 5), f"{ROOT}.down_proj": (3, 5, 2)})


@pytest.mark.parametrize("up_first", [False, True])
def test_experts_arrive_however_the_engine_keeps_them(up_first):
    model, loader = Experts(up_first), WeightLoader()
    for count in (9, 9, 9):  # all of them by the first update
        tensors = stacked()
        loader.load(model, tensors)
        (_, gate_up), (_, down) = tensors
        gate, up = gate_up.chunk(2, dim=1)
        assert torch.equal(model.w13_weight, torch.cat((up, gate) if up_first else (gate, up), dim=1))
        assert torch.equal(model.w2_weight, down)
        assert len(model.loaded) == count


def test_experts_may_come_in_parts_from_several_senders():
    model, loader = Experts(up_first=True), WeightLoader()
    for _ in range(3):
        (_, gate_up), (_, down) = stacked()
        gate, up = gate_up.chunk(2, dim=1)
        for name, tensor in (("gate_up_proj", gate_up), ("down_proj", down)):
            loader.load(model, [(experts_part(f"{ROOT}.{name}", 1, 2), tensor[1:])])
            loader.load(model, [(experts_part(f"{ROOT}.{name}", 0, 0), tensor[:1])])
        loader.finish(model)
        assert torch.equal(model.w13_weight, torch.cat((up, gate), dim=1))
        assert torch.equal(model.w2_weight, down)
    assert sorted(set(model.loaded)) == sorted(model.loaded[:9])


def test_stacked_experts_that_are_kept_as_they_come_take_two_copies_in_all():
    model, loader = Experts(up_first=False), WeightLoader()
    loader.load(model, stacked())
    with torch.profiler.profile() as profile:
        loader.load(model, stacked())
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::copy_") <= 2


def test_parts_go_into_fused_parameters_and_are_converted():
    model, loader = Shard(), WeightLoader()
    for _ in range(3):
        tensors = bucket(q=(4, 3), v=(4, 3))
        loader.load(model, tensors)
        wanted = torch.cat([tensor[2:] for _, tensor in tensors]).bfloat16()
        assert torch.equal(model.qv, wanted)
    assert model.loaded == ["q", "v"]


def test_tensors_that_are_computed_with_go_through_the_loader_every_time():
    model, loader = Transforming(), WeightLoader()
    for _ in range(3):
        tensors = bucket(a=(3,), b=(3,), c=(3,))
        loader.load(model, tensors)
        loader.finish(model)
        values = dict(tensors)
        assert torch.equal(model.a, -values["a"].exp())
        assert torch.equal(model.b, values["b"])
        assert torch.equal(model.c, 2 * values["c"])
    assert model.loaded == ["a", "b", "c", "a", "c", "a", "c"]


def test_parameters_that_something_is_made_of_are_always_loaded_by_the_loader():
    """Also when that is seen only while another bucket is loaded."""
    model, loader = Deriving(), WeightLoader()
    for order in ("bc", "cb", "bc"):
        buckets = [bucket(**{name: (3,)}) for name in order]
        for tensors in buckets:
            loader.load(model, tensors)
        loader.finish(model)
        values = dict(pair for tensors in buckets for pair in tensors)
        assert torch.equal(model.c, values["c"])
        assert torch.equal(model.twice, 2 * values["b"])
    assert model.loaded == ["b", "c", "b", "b"]


def test_what_waits_for_the_end_outlives_its_bucket():
    model, loader = Deriving(), WeightLoader()
    loader.load(model, bucket(b=(3,)))
    ((_, values),) = tensors = bucket(b=(3,))
    wanted = values.clone()
    loader.load(model, tensors)
    values.zero_()
    loader.finish(model)
    assert torch.equal(model.twice, 2 * wanted)


def test_a_tensor_that_its_parameter_does_not_hold_afterwards_is_not_repeated():
    class Overwriting(Transforming):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            self.b.data.copy_(tensor)
            self.b.data.zero_()

    model, loader = Overwriting(), WeightLoader()
    for _ in range(2):
        loader.load(model, bucket(b=(3,)))
        loader.finish(model)
        assert not model.b.any()
    assert model.loaded == ["b", "b"]


class Blocks(Model):
    """Two experts with FP8 weights and scales, each kept stacked as SGLang does."""

    def __init__(self) -> None:
        super().__init__(
            weight=torch.zeros(2, 384, 256, dtype=torch.float8_e4m3fn),
            weight_scale_inv=torch.zeros(2, 3, 2),
            norm=torch.zeros(4),
        )

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm":
            self.norm.data.copy_(tensor)
            return
        expert, kind, parameter = name.removeprefix(f"{ROOT}.").split(".")
        if kind == "down_proj":  # rows of the third block
            place = (2, 1) if parameter.endswith("inv") else (256, 128)
        else:
            place = ((kind == "up_proj") * 1, 1) if parameter.endswith("inv") else ((kind == "up_proj") * 128, 128)
        self.get_parameter(parameter).data[int(expert)].narrow(0, *place).copy_(tensor)


def test_quantized_experts_are_copied_with_their_scales():
    torch.manual_seed(0)
    model, loader = Blocks(), WeightLoader()
    for number in range(3):
        stacked, down = torch.randn(2, 256, 256) * (number + 1), torch.randn(2, 128, 256)
        sent = [
            (f"{ROOT}.gate_up_proj", stacked),
            (f"{ROOT}.down_proj", down),
            ("norm", torch.full((4,), number * 1.0)),
        ]
        loader.load(model, list(quantized(sent, "fp8_all")))
        loader.finish(model)
        wanted, scales = quantize_blocks(torch.cat((stacked, down), 1))
        assert torch.equal(model.weight.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(model.weight_scale_inv, scales)
        assert model.norm.tolist() == [number] * 4
    assert len([name for name in model.loaded if name != "norm"]) == 12  # asked for once, then repeated


class Projections(Model):
    """Square weights in 8 bits: one kept as it comes, one whose rows are its columns, written as such or read as such,
    one kept twice, and one that its parameter holds a part of."""

    def __init__(self) -> None:
        names = ("plain", "turned", "turning", "twice", "twin", "part")
        super().__init__(**{name: torch.zeros(128, 128, dtype=torch.float8_e4m3fn) for name in names})

    def load(self, name: str, tensor: torch.Tensor) -> None:
        kept = {one: parameter.data for one, parameter in self.named_parameters()}
        if name == "turned":
            kept[name].T.copy_(tensor)
        elif name == "part":
            kept[name].copy_(tensor[:128])
        else:
            kept[name].copy_(tensor.T if name == "turning" else tensor)
        if name == "twice":
            kept["twin"].copy_(tensor)


def test_only_a_parameter_that_is_a_tensor_as_it_comes_is_a_place_for_it():
    model, loader = Projections(), WeightLoader()
    sent = [(name, torch.randn(128, 128).to(torch.float8_e4m3fn)) for name in ("plain", "turned", "turning", "twice")]
    sent.append(("part", torch.randn(256, 128).to(torch.float8_e4m3fn)))
    assert all(loader.place(name, tensor.shape, tensor.dtype) is None for name, tensor in sent)
    loader.load(model, sent)
    places = {name: loader.place(name, tensor.shape, tensor.dtype) for name, tensor in sent}
    assert [name for name, place in places.items() if place is not None] == ["plain"]
    assert places["plain"].data_ptr() == model.plain.data_ptr() and places["plain"].shape == (128, 128)
    assert loader.place("plain", torch.Size((128, 128)), torch.bfloat16) is None


class WholeBlocks(Model):
    """Two experts, kept as stacked tensors come."""

    def __init__(self) -> None:
        super().__init__(
            w13_weight=torch.zeros(2, 256, 128, dtype=torch.float8_e4m3fn), w13_weight_scale_inv=torch.zeros(2, 2, 1)
        )

    def load(self, name: str, tensor: torch.Tensor) -> None:
        expert, kind, parameter = name.removeprefix(f"{ROOT}.").split(".")
        rows = 1 if parameter.endswith("inv") else 128
        target = self.get_parameter(f"w13_{parameter}").data[int(expert)]
        target.narrow(0, (kind == "up_proj") * rows, rows).copy_(tensor)


def test_an_update_quantizes_experts_straight_into_the_parameter_that_keeps_them_as_they_come(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv(block_fp8.VARIABLE, "fp8")
    model, loader = WholeBlocks(), WeightLoader()
    updater = SimpleNamespace(get_model=lambda: model)
    name, shape = f"{ROOT}.gate_up_proj", (2, 256, 128)
    written = []
    monkeypatch.setattr(
        block_fp8, "quantize_blocks", lambda *given: written.append(given[1]) or quantize_blocks(*given)
    )
    for number in range(3):
        stacked = torch.randn(shape) * (number + 1)
        update = _Update(updater, loader)
        update.take(WeightBucket((TensorSpec(name, "float32", shape),), stacked.nbytes), stacked.flatten())
        update.finish()
        wanted, scales = quantize_blocks(stacked)
        assert torch.equal(model.w13_weight.float(), wanted.float())
        assert torch.equal(model.w13_weight_scale_inv, scales)
    assert len(model.loaded) == 8  # asked for once
    assert [None if place is None else place.data_ptr() for place in written] == [
        None,
        *[model.w13_weight.data_ptr()] * 2,
    ]


def test_a_weight_without_its_scales_is_refused_where_the_engine_keeps_8_bits():
    with pytest.raises(RolloutError, match=r"gate_up_proj' came in torch.float32 for a parameter .* in 8 bits"):
        WeightLoader().load(Blocks(), [(f"{ROOT}.gate_up_proj", torch.randn(2, 256, 256))])


@pytest.mark.parametrize("shape", [(256, 128), (300, 200), (3, 130, 256)])
def test_blocks_are_quantized_as_a_loop_over_them_does(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16() * torch.rand(shape[-2])[:, None].bfloat16()
    weight[..., :128, :128] = 0
    numbers, scales = quantize_blocks(weight)
    flat, flat_numbers, flat_scales = (
        weight.reshape(-1, *shape[-2:]),
        *(one.reshape(-1, *one.shape[-2:]) for one in (numbers, scales)),
    )
    for index, matrix in enumerate(flat):
        for row in range(0, shape[-2], 128):
            for column in range(0, shape[-1], 128):
                block = matrix[row : row + 128, column : column + 128].float()
                scale = block.abs().max() / 448 if block.any() else torch.tensor(1.0)
                assert flat_scales[index, row // 128, column // 128] == scale
                found = flat_numbers[index, row : row + 128, column : column + 128].float()
                assert torch.equal(found, (block / scale).to(torch.float8_e4m3fn).float())
                assert ((found * scale - block).abs() <= block.abs() / 16 + scale / 512).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_in_8_bits_and_harms_no_other_block(value):
    weight = torch.ones(2, 256, 256).bfloat16()
    weight[1, 3, 200] = value
    numbers, scales = quantize_blocks(weight)
    found = numbers.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert not found[1, 3, 200].isfinite()
    found[1, :128, 128:] = 1
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("size", [torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny])
def test_the_largest_and_the_smallest_weights_survive(size):
    weight = torch.full((128, 128), size, dtype=torch.bfloat16)
    weight[0] = 0
    numbers, scales = quantize_blocks(weight)
    found = numbers.double() * scales.double()
    assert torch.allclose(found, weight.double(), rtol=1e-3, atol=0)


def test_what_stays_in_bfloat16_is_the_same_for_tensors_and_for_modules():
    pairs = {
        "model.layers.3.self_attn.q_proj.weight": "model.layers.3.self_attn.qkv_proj",
        "model.layers.3.self_attn.o_proj.weight": "model.layers.3.self_attn.o_proj",
        "model.layers.0.mlp.experts.gate_up_proj": "model.layers.0.mlp.experts",
        "model.layers.0.mlp.experts.64-127.gate_up_proj": "model.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts.7.down_proj.weight": "mtp.layers.0.mlp.experts",
        "model.layers.0.mlp.shared_expert.up_proj.weight": "model.layers.0.mlp.shared_expert.gate_up_proj",
        "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj",
    }
    assert all(
        is_quantized(name, "fp8_all") and is_quantized_module(module, "fp8_all") for name, module in pairs.items()
    )
    for name, module in pairs.items():
        expert = ".experts" in name
        assert is_quantized(name, "fp8") == is_quantized_module(module, "fp8") == expert
        assert not is_quantized(name, "none") and not is_quantized_module(module, "none")
    others = {
        "model.layers.0.linear_attn.out_proj.weight": "model.layers.0.linear_attn.out_proj",
        "model.layers.0.linear_attn.in_proj_qkv.weight": "model.layers.0.linear_attn.in_proj_qkvz",
        "model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate.weight": "model.layers.0.mlp.shared_expert_gate",
        "model.layers.3.self_attn.q_norm.weight": "model.layers.3.self_attn.q_norm",
        "lm_head.weight": "lm_head",
        "mtp.fc.weight": "fc",
        "model.visual.blocks.0.mlp.up_proj.weight": "model.visual.blocks.0.mlp.up_proj",
    }
    for kind in ("fp8_all", "fp8"):
        assert not any(is_quantized(name, kind) or is_quantized_module(module, kind) for name, module in others.items())
