"""Outputs and gradients of the actor's layers, beside those of plain torch in the same dtype and in float32.

The plain layers share parameters and routes with the real ones, and none of their kernels but that of the delta rule in
bfloat16, which has tests of its own: what they lose against float32 is what this dtype costs.
"""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isfunction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from actor.device import compute_device, synchronize
from actor.distributed import start_model_parallel
from actor.layers import (
    attention,
    causal_attention,
    expert_dispatch,
    experts,
    gated_delta_net,
    gated_mlp,
    norm,
    router,
    swiglu,
)
from actor.layers.gated_delta_net import GatedDeltaNet
from actor.layers.gdn_kernels import DeltaRule, GdnKernels, load_kernels
from actor.layers.gdn_torch import chunked_delta_rule, projected_heads
from actor.layers.packed import PackInputs, pack_to_device
from actor.models.build_model import build_model
from actor.models.policy_model import PolicyModel
from benchmarks.layer_shapes import hybrid_config, random_pack
from rlpipe.config.actor import ActorConfig
from rlpipe.jit_monitor import JitMonitor
from rlpipe.model.model_reader import trainable_model

LAYERS, VOCABULARY = 4, 1024


@dataclass(frozen=True)
class Passed:
    """Of one forward and backward pass: float hidden states [t, h], and each parameter's gradient."""

    hidden: torch.Tensor
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """Of one tensor. Errors are norms of differences from the float32 tensor over its norm, turns 1 - cosine with it.

    found_*: of the layers as they run; plain_*: of plain torch in the same dtype.
    """

    name: str
    size: int
    norm: float
    found_error: float
    plain_error: float
    found_turn: float
    plain_turn: float


def compare(
    rank: int, count: int, backend: str, lengths: Sequence[int], tiny: bool, planted: Sequence[str]
) -> dict[str, list[Comparison]]:
    """Of the hidden states, of the token whose hidden states are worst, and of every gradient.

    By the name of the error of `ERRORS` that the layers had: "" for none, and each of `planted`. The device holds the
    gradients of two plain passes and of the one that is compared with them.
    """
    JitMonitor.install()  # with it all cores compile what Triton tunes, as in a run
    actor = ActorConfig(dtype="bfloat16", gdn_backend=backend, threads=1)
    start_model_parallel(actor, seed=0)
    (policy,) = build_model(trainable_model(hybrid_config(LAYERS, VOCABULARY, tiny)), actor)
    _randomize(policy)
    inputs = pack_to_device(random_pack(lengths, VOCABULARY), compute_device())
    generator = torch.Generator(compute_device()).manual_seed(1)
    direction = torch.randn(sum(lengths), policy.config.hidden_size, generator=generator, device=compute_device())
    with pytest.MonkeyPatch.context() as patch:
        routes = _record_routes(patch)
        found = _timed_pass("real layers", policy, inputs, direction)
    inputs.sequences.routes = torch.stack(routes, 1).to(torch.int16)
    with _plain_layers(policy, load_kernels(_backend(policy)).delta_rule):
        plain = _timed_pass("plain layers", policy, inputs, direction)
    with _in_float32(policy), _plain_layers(policy, chunked_delta_rule):
        exact = _timed_pass("plain layers in float32", policy, inputs, direction)
    inputs.sequences.routes = None
    compared = {"": _compared(found, plain, exact)}
    del found
    for name in planted:
        with pytest.MonkeyPatch.context() as patch:
            ERRORS[name](patch, inputs)
            compared[name] = _compared(_timed_pass(name, policy, inputs, direction), plain, exact)
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(f"\nmost memory: {host_bytes / 1e9:.1f} GB of the host, {device_bytes / 1e9:.1f} GB of the GPU", flush=True)
    return compared


def _randomize(policy: PolicyModel) -> None:
    """Values that no parameter's influence vanishes with."""
    generator = torch.Generator(compute_device()).manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(1, 16, generator=generator).log_()
            elif name.endswith("conv1d.weight"):
                parameter.normal_(std=0.3, generator=generator)
            elif parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator, device=parameter.device) * 0.2)


def _backend(policy: PolicyModel) -> Any:
    return next(layer.kernels.backend for layer in policy.modules() if isinstance(layer, GatedDeltaNet))


def _timed_pass(name: str, policy: PolicyModel, inputs: PackInputs, direction: torch.Tensor) -> Passed:
    """The gradient is a random one: that of the hidden states' own norm vanishes behind the last norm."""
    start = time.perf_counter()
    hidden = policy(inputs).squeeze(1)
    hidden.backward(direction.to(hidden.dtype))
    gradients = {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}
    for parameter in policy.parameters():
        parameter.grad = None
    synchronize()
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    return Passed(hidden.detach(), gradients)


def _record_routes(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Which experts each layer chooses: were plain layers to choose their own, near ties would hide all else."""
    routes: list[torch.Tensor] = []
    routing = router.ReplayRouter.routing

    def recorded(self: Any, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = routing(self, *arguments, **keywords)
        routes.append(chosen)
        return weights, chosen

    patch.setattr(router.ReplayRouter, "routing", recorded)
    return routes


@contextmanager
def _in_float32(policy: PolicyModel) -> Iterator[None]:
    """What bfloat16 holds float32 holds, too, so that nothing changes by the way there and back."""
    dtype, dtypes = policy.config.params_dtype, [one.dtype for one in policy.parameters()]
    policy.float()
    policy.config.params_dtype = torch.float32
    yield
    policy.config.params_dtype = dtype
    for one, before in zip(policy.parameters(), dtypes, strict=True):
        one.data = one.data.to(before)


_WITH_KERNELS = {norm: ("rms_norm", "zero_centered_rms_norm"), gated_delta_net: ("gated_rms_norm", "gates")}


@contextmanager
def _plain_layers(policy: PolicyModel, delta_rule: DeltaRule) -> Iterator[None]:
    mixers = [layer for layer in policy.modules() if isinstance(layer, GatedDeltaNet)]
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        for mixer in mixers:
            patch.setattr(mixer, "kernels", GdnKernels("plain", projected_heads, delta_rule))
        patch.setattr(attention, "causal_attention", _plain_attention)
        patch.setattr(router, "Logits", SimpleNamespace(apply=lambda x, weight: (x.float() @ weight.float().t(), x)))
        patch.setattr(expert_dispatch, "SpreadRowsBeside", SimpleNamespace(apply=_spread_beside))
        patch.setattr(expert_dispatch, "SumRowsBeside", SimpleNamespace(apply=_sum_beside))
        patch.setattr(experts, "grouped_product", _products)
        patch.setattr(experts, "weighted_swiglu", swiglu.weighted_product_of.__wrapped__)
        patch.setattr(gated_mlp, "swiglu", swiglu.product_of.__wrapped__)
        for module, names in _WITH_KERNELS.items():
            for name in names:
                patch.setattr(module, name, getattr(module, name).__wrapped__)
        if torch.cuda.is_available():
            _forbid_kernels(patch)
        yield


def _forbid_kernels(patch: pytest.MonkeyPatch) -> None:
    from actor.layers import gdn_inputs, triton_kernels, triton_norms

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a kernel ran in plain layers")

    for module in (triton_kernels, triton_norms):
        for name in [name for name, one in vars(module).items() if isfunction(one) and name[0] != "_"]:
            patch.setattr(module, name, forbidden)
    patch.setattr(gdn_inputs.ProjectedHeads, "apply", forbidden)


def _plain_attention(query: Any, key: Any, value: Any, queries: Any, keys: Any, scale: float) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return causal_attention._causal_in_batches(query, key, value, queries, scale)


def _spread_beside(tokens: torch.Tensor, rows: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = tokens.new_zeros(rows.numel(), tokens.shape[1])
    spread = out.index_copy(0, rows.flatten(), tokens.repeat_interleave(rows.shape[1], 0))
    return spread, tokens, F.linear(tokens, gate)


def _sum_beside(
    expert_rows: torch.Tensor, rows: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    return expert_rows[rows].sum(1) + shared * logits.sigmoid()


def _products(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    counts = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    return torch.cat([F.linear(rows, one) for rows, one in zip(x.split(counts), weight.unbind(), strict=True)])


def _compared(found: Passed, plain: Passed, exact: Passed) -> list[Comparison]:
    assert found.gradients.keys() == plain.gradients.keys() == exact.gradients.keys()
    worst = _worst_token(found, exact), _worst_token(plain, exact)
    rows = [_comparison("hidden states", found.hidden, plain.hidden, exact.hidden)]
    rows.append(Comparison("hidden states of the worst token", exact.hidden.shape[1], 1.0, *worst, 0.0, 0.0))
    for name, gradient in exact.gradients.items():
        rows.append(_comparison(name, found.gradients[name], plain.gradients[name], gradient))
    return rows


def _worst_token(one: Passed, exact: Passed) -> float:
    return float(((one.hidden.float() - exact.hidden).norm(dim=1) / exact.hidden.norm(dim=1)).max())


def _comparison(name: str, *tensors: torch.Tensor) -> Comparison:
    found, plain, exact = tensors
    norm = exact.norm()
    errors = [float((one.float() - exact).norm() / norm) for one in (found, plain)]
    turns = [_turn(one.float(), exact) for one in (found, plain)]
    return Comparison(name, exact.numel(), float(norm), *errors, *turns)


def _turn(one: torch.Tensor, other: torch.Tensor) -> float:
    """1 - cosine, without the cancellation of its formula."""
    return float((one / one.norm() - other / other.norm()).square().sum() / 2)


def _convolve_over_ends(patch: pytest.MonkeyPatch, inputs: PackInputs) -> None:
    """The short convolution takes the pack for one sequence."""
    sequences = inputs.sequences
    places = torch.arange(sequences.total_tokens, dtype=torch.int32, device=sequences.device)
    patch.setitem(sequences.__dict__, "places", places)


def _scale_weight_gradients(patch: pytest.MonkeyPatch, _: PackInputs) -> None:
    """The gradients of the weights of experts, and with them the router's, are 10 % too large."""
    from actor.layers import triton_kernels

    gradient = triton_kernels.swiglu_gradient
    scaled = lambda *arguments: _scaled_second(gradient(*arguments))  # noqa: E731
    patch.setattr(triton_kernels, "swiglu_gradient", scaled)


def _scaled_second(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0], pair[1] * 1.1


def _scale_gate_gradients(patch: pytest.MonkeyPatch, _: PackInputs) -> None:
    """The gradient of the shared expert's gate is 10 % too large."""
    function = expert_dispatch.SumRowsBeside

    def scaled(rows: torch.Tensor, places: torch.Tensor, shared: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return function.apply(rows, places, shared, logits * 1.1 - logits.detach() * 0.1)

    patch.setattr(expert_dispatch, "SumRowsBeside", SimpleNamespace(apply=scaled))


ERRORS: dict[str, Callable[[pytest.MonkeyPatch, PackInputs], None]] = {
    "convolution over ends": _convolve_over_ends,
    "scaled gradients of weights": _scale_weight_gradients,
    "scaled gradients of gates": _scale_gate_gradients,
}
