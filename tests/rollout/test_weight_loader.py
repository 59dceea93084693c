"""What SGLang's loader did once is repeated without it, where it only copied; all else goes through it every time."""

from types import SimpleNamespace

import pytest
import torch

from rlpipe.shared.block_fp8 import quantize_blocks, quantized
from rlpipe.shared.errors import RolloutError
from rlpipe.shared.quantization import specs_as_sent
from rlpipe.shared.weights import TensorSpec, WeightBucket, experts_part
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
        loader.load(model, [part for pair in sent for part in quantized(*pair, "fp8_all")])
        loader.finish(model)
        wanted, scales = quantize_blocks(torch.cat((stacked, down), 1))
        assert torch.equal(model.weight.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(model.weight_scale_inv, scales)
        assert model.norm.tolist() == [number] * 4
    assert len([name for name in model.loaded if name != "norm"]) == 12  # asked for once, then repeated


class WholeBlocks(Model):
    """Two experts, kept as stacked tensors come."""

    def __init__(self) -> None:
        super().__init__(
            w13_weight=torch.zeros(2, 256, 128, dtype=torch.float8_e4m3fn),
            w13_weight_scale_inv=torch.zeros(2, 2, 1),
            norm=torch.zeros(3),
        )

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm":
            self.norm.data.copy_(tensor)
            return
        expert, kind, parameter = name.removeprefix(f"{ROOT}.").split(".")
        rows = 1 if parameter.endswith("inv") else 128
        target = self.get_parameter(f"w13_{parameter}").data[int(expert)]
        target.narrow(0, (kind == "up_proj") * rows, rows).copy_(tensor)


def test_an_update_in_8_bits_arrives_with_its_scales_beside_what_has_none():
    torch.manual_seed(0)
    model, loader = WholeBlocks(), WeightLoader()
    updater = SimpleNamespace(get_model=lambda: model)
    experts = TensorSpec(f"{ROOT}.gate_up_proj", "bfloat16", (2, 256, 128))
    bucket = WeightBucket((TensorSpec("norm", "bfloat16", (3,)), *specs_as_sent(experts, "fp8")))
    for number in range(3):
        stacked, flat = torch.randn(2, 256, 128) * (number + 1), torch.zeros(bucket.size_bytes, dtype=torch.uint8)
        wanted, scales = quantize_blocks(stacked)
        for piece, values in zip(bucket.pieces(flat), (torch.full((3,), number), wanted, scales), strict=True):
            piece.copy_(values)
        update = _Update(updater, loader)
        update.take(bucket, flat)
        update.finish()
        assert torch.equal(model.w13_weight.float(), wanted.float())
        assert torch.equal(model.w13_weight_scale_inv, scales)
        assert model.norm.tolist() == [number] * 3
    assert len([name for name in model.loaded if name != "norm"]) == 8  # asked for once


def test_a_weight_without_its_scales_is_refused_where_the_engine_keeps_8_bits():
    with pytest.raises(RolloutError, match=r"gate_up_proj' came in torch.float32 for a parameter .* in 8 bits"):
        WeightLoader().load(Blocks(), [(f"{ROOT}.gate_up_proj", torch.randn(2, 256, 256))])
