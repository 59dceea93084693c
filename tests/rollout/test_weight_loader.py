"""Stacked experts are copied whole only into engines that keep them as they come."""

import pytest
import torch

from rollout.weight_loader import WeightLoader

ROOT = "model.layers.0.mlp.experts"


class Experts(torch.nn.Module):
    """Three experts as SGLang's loader fills them: gate before up, or up before gate as some of its kernels want it."""

    def __init__(self, up_first: bool) -> None:
        super().__init__()
        self.up_first = up_first
        self.loaded: list[str] = []
        self.w13_weight = torch.nn.Parameter(torch.zeros(3, 4, 5))
        self.w2_weight = torch.nn.Parameter(torch.zeros(3, 5, 2))

    def named_parameters(self, *_: object, **__: object):
        return iter({f"{ROOT}.w13_weight": self.w13_weight, f"{ROOT}.w2_weight": self.w2_weight}.items())

    def load_weights(self, tensors) -> None:
        for name, tensor in tensors:
            self.loaded.append(name)
            expert, kind = name.removeprefix(f"{ROOT}.").split(".")[:2]
            if kind == "down_proj":
                self.w2_weight[int(expert)] = tensor
            else:
                second = (kind == "up_proj") != self.up_first
                self.w13_weight[int(expert), 2 if second else 0 :][:2] = tensor


def stacked() -> list[tuple[str, torch.Tensor]]:
    return [(f"{ROOT}.gate_up_proj", torch.randn(3, 4, 5)), (f"{ROOT}.down_proj", torch.randn(3, 5, 2))]


@pytest.mark.parametrize("up_first", [False, True])
def test_experts_arrive_however_the_engine_keeps_them(up_first):
    model, loader = Experts(up_first), WeightLoader()
    for _ in range(3):
        model.loaded.clear()
        tensors = stacked()
        loader.load(model, tensors)
        (_, gate_up), (_, down) = tensors
        gate, up = gate_up.chunk(2, dim=1)
        assert torch.equal(model.w13_weight, torch.cat((up, gate) if up_first else (gate, up), dim=1))
        assert torch.equal(model.w2_weight, down)
    assert len(model.loaded) == (6 if up_first else 0)


def test_equal_halves_teach_nothing_about_their_order():
    model, loader = Experts(up_first=True), WeightLoader()
    half = torch.ones(3, 2, 5)
    loader.load(model, [(f"{ROOT}.gate_up_proj", torch.cat((half, half), dim=1))])
    gate_up = torch.randn(3, 4, 5)
    loader.load(model, [(f"{ROOT}.gate_up_proj", gate_up)])
    assert torch.equal(model.w13_weight, gate_up.roll(2, dims=1))
