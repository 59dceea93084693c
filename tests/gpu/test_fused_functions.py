"""Stretches of one kernel give what the plain functions give, and another number of rows compiles nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: elsewhere nothing is compiled", allow_module_level=True)

import triton

from actor.head import response_logprobs
from actor.layers.attention import gate_output
from actor.layers.expert_rows import (
    SpreadRows,
    SpreadRowsBeside,
    SumRows,
    SumRowsBeside,
    sort_by_expert,
    spread_rows,
    spread_rows_beside,
    sum_rows,
    sum_rows_and,
    sum_rows_beside,
)
from actor.layers.gated_delta_net import gated_rms_norm, gates
from actor.layers.logits import Chosen, logit_gradient, softmax_parts
from actor.layers.norm import rms_norm, zero_centered_rms_norm
from actor.layers.rope import rotate
from actor.layers.router import Logits, NormalizedChoice
from actor.layers.swiglu import product_of, swiglu, weighted_product_of, weighted_swiglu

ROWS = (96, 300, 77, 1024)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _choices(rows: int) -> torch.Tensor:
    chosen = torch.rand(rows, 16, device="cuda").argsort(-1)[:, :2]
    return sort_by_expert(chosen, 16)[1]


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "rms_norm": (rms_norm, lambda rows: (_random(rows, 256), _random(256), 1e-6)),
    "zero_centered_rms_norm": (zero_centered_rms_norm, lambda rows: (_random(rows, 256), _random(256), 1e-6)),
    "gated_rms_norm": (
        gated_rms_norm,
        lambda rows: (_random(rows, 4, 64), _random(rows, 800)[:, 100:356].unflatten(-1, (4, 64)), _random(64), 1e-6),
    ),
    "gates": (
        gates,
        lambda rows: (_random(rows, 800)[:, 100:132], _random(rows, 800)[:, 200:232], _random(32), _random(32)),
    ),
    "rotate": (rotate, lambda rows: (_random(rows, 4, 128), _random(rows, 2, 1, 32))),
    "gate_output": (gate_output, lambda rows: (_random(rows, 4, 128), _random(rows, 4, 128))),
}
WITHOUT_GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "product_of": (product_of, lambda rows: (_random(rows, 512),)),
    "weighted_product_of": (weighted_product_of, lambda rows: (_random(rows, 512), torch.rand(rows, 1, device="cuda"))),
    "sum_rows": (sum_rows, lambda rows: (_random(2 * rows, 256), _choices(rows))),
    "sum_rows_beside": (
        sum_rows_beside,
        lambda rows: (_random(2 * rows, 256), _choices(rows), _random(rows, 256), _random(rows, 1)),
    ),
    "sum_rows_and": (
        sum_rows_and,
        lambda rows: (_random(2 * rows, 256), _choices(rows), _random(rows, 256), _random(rows, 1), _random(256)),
    ),
    "spread_rows_beside": (
        spread_rows_beside,
        lambda rows: (_random(rows, 256), _choices(rows), _random(rows, 256), _random(rows, 1)),
    ),
}


def _floats(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    return [one for one in arguments if torch.is_tensor(one) and one.is_floating_point()]


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def _wide(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.float() if torch.is_tensor(one) and one.is_floating_point() else one for one in arguments)


def _outputs(found: Any) -> tuple[torch.Tensor, ...]:
    return (found,) if torch.is_tensor(found) else tuple(found)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_those_in_float32(name):
    function, make = CASES[name]
    arguments = make(300)
    wide = _wide(arguments)
    for tensor in (*_floats(arguments), *_floats(wide)):
        tensor.requires_grad_()
    found, wanted = _outputs(function(*arguments)), _outputs(function.__wrapped__(*wide))
    upstream = [torch.randn_like(one) for one in wanted]
    torch.autograd.backward(found, [one.to(out.dtype) for one, out in zip(upstream, found, strict=True)])
    torch.autograd.backward(wanted, upstream)
    for one, right in zip(found, wanted, strict=True):
        assert _relative(one, right.detach()) < 5e-3
    for narrow, exact in zip(_floats(arguments), _floats(wide), strict=True):
        assert _relative(narrow.grad, exact.grad) < 1e-2


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_values_equal_those_in_float32(name):
    function, make = WITHOUT_GRADIENTS[name]
    for rows in (1, 300):
        arguments = make(rows)
        found, wanted = _outputs(function(*arguments)), _outputs(function.__wrapped__(*_wide(arguments)))
        for one, right in zip(found, wanted, strict=True):
            assert one.shape == right.shape and _relative(one, right) < 5e-3


@pytest.mark.parametrize("name", CASES | WITHOUT_GRADIENTS)
def test_other_numbers_of_rows_compile_nothing(name):
    function, make = (CASES | WITHOUT_GRADIENTS)[name]
    function(*make(200))
    compiled: list[str] = []
    with torch.compiler.set_stance("fail_on_recompile"), _compilations(compiled):
        for rows in ROWS:
            function(*make(rows))
    assert compiled == []


@contextmanager
def _compilations(names: list[str]) -> Iterator[None]:
    """Those of Triton."""
    knob, before = triton.knobs.compilation, triton.knobs.compilation.listener
    knob.listener = lambda *, src, **_: names.append(src.name)
    yield
    knob.listener = before


@pytest.mark.parametrize("width", [256, 6144])
def test_spread_rows_are_those_of_plain_torch_and_have_its_gradients(width):
    for tokens in (1, 300):
        rows, values = _choices(tokens), _random(tokens, width).requires_grad_()
        found = spread_rows(values.detach(), rows)
        assert torch.equal(found.cpu(), spread_rows(values.detach().cpu(), rows.cpu()))
        direction = torch.randn_like(found)
        (gradient,) = torch.autograd.grad(SpreadRows.apply(values, rows), values, direction)
        assert torch.equal(gradient, sum_rows(direction, rows))
        summed = SumRows.apply(direction.requires_grad_(), rows)
        (gradient,) = torch.autograd.grad(summed, direction, torch.ones_like(summed))
        assert torch.equal(gradient, torch.ones_like(gradient))


def test_the_sum_beside_the_shared_expert_has_the_gradients_of_plain_torch():
    tokens = 300
    places = _choices(tokens)
    arguments = [_random(2 * tokens, 256), _random(tokens, 256), _random(tokens, 1)]
    narrow = [one.clone().requires_grad_() for one in arguments]
    wide = [one.float().requires_grad_() for one in arguments]
    found = SumRowsBeside.apply(narrow[0], places, *narrow[1:])
    wanted = wide[0][places].sum(1) + wide[1] * wide[2].sigmoid()
    direction = torch.randn_like(wanted)
    found.backward(direction.to(found.dtype))
    wanted.backward(direction)
    assert _relative(found, wanted.detach()) < 5e-3
    for one, exact in zip(narrow, wide, strict=True):
        assert _relative(one.grad, exact.grad) < 1e-2


def test_hidden_states_that_pass_the_router_and_the_experts_have_the_gradients_of_plain_torch():
    tokens, places = 300, _choices(300)
    arguments = [_random(tokens, 256), _random(16, 256), _random(1, 256)]
    narrow = [one.clone().requires_grad_() for one in arguments]
    wide = [one.float().requires_grad_() for one in arguments]
    scores, passed = Logits.apply(narrow[0], narrow[1])
    found = (scores, *SpreadRowsBeside.apply(passed, places, narrow[2]))
    order = places.flatten().argsort() // 2
    wanted = (wide[0] @ wide[1].t(), wide[0][order], wide[0] * 1.0, wide[0] @ wide[2].t())
    upstream = [torch.randn_like(one) for one in wanted]
    gradients = torch.autograd.grad(
        found, narrow, [one.to(out.dtype) for one, out in zip(upstream, found, strict=True)]
    )
    for one, right in zip((*found, *gradients), (*wanted, *torch.autograd.grad(wanted, wide, upstream)), strict=True):
        assert _relative(one, right.detach()) < 1e-2


@pytest.mark.parametrize("experts", [256, 60])
def test_chosen_experts_and_their_weights_are_those_of_plain_torch(experts):
    for tokens in (1, 300):
        logits = torch.randn(tokens, experts, device="cuda", requires_grad=True)
        weights, chosen = NormalizedChoice.apply(logits, 6)
        values, wanted = logits.topk(6)
        assert torch.equal(chosen, wanted)
        torch.testing.assert_close(weights, values.softmax(-1))
        direction = torch.randn_like(weights)
        (found,) = torch.autograd.grad(weights, logits, direction)
        (right,) = torch.autograd.grad(values.softmax(-1), logits, direction)
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("experts", [256, 60, 5])
def test_broken_logits_choose_experts_that_exist_and_give_broken_weights(experts):
    logits = torch.randn(40, experts, device="cuda")
    logits[0], logits[1, 3], logits[2], logits[3, 4] = float("nan"), float("nan"), float("-inf"), float("inf")
    logits[4, :-1] = float("-inf")
    weights, chosen = NormalizedChoice.apply(logits, 3)
    values, _ = logits.topk(3)
    torch.testing.assert_close(weights, values.softmax(-1), equal_nan=True)
    ordered = chosen.sort(-1).values
    assert ordered.min() >= 0 and ordered.max() < experts and (ordered.diff() > 0).all()
    assert chosen[1, 0] == 3
    values = _random(40, 256)
    rows = sort_by_expert(chosen, experts)[1]
    summed = sum_rows(spread_rows(values, rows) * weights.flatten()[rows.flatten().argsort()][:, None], rows)
    assert torch.equal(summed.isnan().all(-1), weights.isnan().any(-1))


@pytest.mark.parametrize("width", [512, 768, 9728])
def test_swiglu_has_the_gradients_of_plain_torch(width):
    for rows in (1, 300):
        gate_up, weights, direction = _random(rows, 2 * width), torch.rand(rows, 1, device="cuda"), _random(rows, width)

        def run(function, *inputs, direction=direction):
            leaves = [one.detach().requires_grad_() for one in inputs]
            out = function(*leaves)
            return out, *torch.autograd.grad(out, leaves, direction.to(out.dtype))

        for found, exact in (
            (run(swiglu, gate_up), run(product_of.__wrapped__, gate_up.float())),
            (run(weighted_swiglu, gate_up, weights), run(weighted_product_of.__wrapped__, gate_up.float(), weights)),
        ):
            for one, right in zip(found, exact, strict=True):
                assert one.shape == right.shape
                assert _relative(one, right) < 5e-3


def _logits(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Chosen]:
    """A third of the targets are another rank's."""
    here = (torch.arange(rows, device="cuda") % 3 > 0).float()
    return 4 * _random(rows, columns, dtype=dtype), Chosen(torch.randint(0, columns, (rows,), device="cuda"), here)


@pytest.mark.parametrize("columns", [151936, 4096, 1003])
def test_softmax_of_logits_and_its_gradient_are_those_of_plain_torch(columns):
    for rows, dtype in ((1, torch.bfloat16), (50, torch.bfloat16), (50, torch.float32)):
        logits, chosen = _logits(rows, columns, dtype)
        normalizer, of_logprob, *of_entropy = torch.randn(4, rows, device="cuda").unbind(0)
        normalizer = normalizer + 14
        for temperatures in (None, 0.5 + torch.rand(rows, device="cuda")):
            found = softmax_parts(logits.clone(), chosen, temperatures, True)
            wanted = softmax_parts.__wrapped__(logits.clone(), chosen, temperatures, True)
            torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-4, atol=1e-4)
            for both in (None, tuple(of_entropy)):
                arguments = (normalizer, chosen, of_logprob, both, temperatures)
                gradient = logit_gradient(logits.clone(), *arguments)
                right = logit_gradient.__wrapped__(logits.clone(), *arguments)
                assert gradient.dtype == dtype
                assert _relative(gradient, right) < (5e-3 if dtype == torch.bfloat16 else 1e-5)


def test_other_numbers_and_places_of_rows_compile_nothing_over_logits():
    def run(rows: int, first: int) -> None:
        logits, chosen = _logits(rows, 1003)
        chosen = Chosen(*(torch.cat((one.new_zeros(first), one))[first:] for one in chosen))
        of_rows = torch.rand(first + 3 * rows + 1, device="cuda")
        normalizer, entropy, upstream = of_rows[first : first + 3 * rows].view(3, rows).unbind(0)
        softmax_parts(logits, chosen, normalizer, True)
        logit_gradient(logits, normalizer, chosen, upstream, (entropy, upstream), None)

    run(200, 0)
    compiled: list[str] = []
    with _compilations(compiled):
        for rows in ROWS:
            run(rows, rows % 4)
    assert compiled == []


def test_the_head_equals_that_in_float32_and_makes_no_float32_logits():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tokens, vocabulary, hidden, chunk = 9000, 32700, 64, 4096
        targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
        upstream = torch.randn(2, tokens, device="cuda")
        narrow = [_random(tokens, hidden), 0.1 * _random(32768, hidden)]
        leaves = [one.clone().requires_grad_() for one in narrow]

        def run() -> tuple[torch.Tensor, ...]:
            scores = response_logprobs(
                *leaves,
                targets,
                vocab_size=vocabulary,
                chunk_tokens=chunk,
                with_entropy=True,
                group=dist.group.WORLD,
            )
            both = torch.stack((scores.logprobs, scores.entropy))
            return both.detach(), *torch.autograd.grad((both * upstream).sum(), leaves)

        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = run()
        logits_bytes = chunk * vocabulary * 2
        assert logits_bytes < torch.cuda.max_memory_allocated() - before < 1.5 * logits_bytes

        wide = [one.float().requires_grad_() for one in narrow]
        log_p = (wide[0] @ wide[1][:vocabulary].t()).log_softmax(-1)
        right = torch.stack((log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
        wanted = (right.detach(), *torch.autograd.grad((right * upstream).sum(), wide))
        for one, exact in zip(found, wanted, strict=True):
            assert _relative(one, exact) < 1e-2
    finally:
        dist.destroy_process_group()
