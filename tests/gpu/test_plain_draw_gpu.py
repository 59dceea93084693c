"""Tokens that an engine on a GPU draws in two kernels, with SGLang's sampler around them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: elsewhere SGLang's sampler is another one", allow_module_level=True)

from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.layers.sampler import Sampler

from rollout.sglang_patches import plain_draw
from rollout.sglang_patches.triton_draw import draw_tokens

PLAIN = {"is_all_greedy": False, "need_top_k_sampling": False, "need_top_p_sampling": False}


def _seeds(rows: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (rows,), device="cuda")


@pytest.mark.parametrize("columns", [1, 7, 4096, 4099, 151_936, 248_320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_the_tokens(columns, dtype):
    rows = 33
    logits = (3 * torch.randn(rows, columns + 5, device="cuda")).to(dtype)[:, :columns]  # as a padded vocabulary is cut
    temperatures = torch.rand(rows, device="cuda") + 0.5
    tokens, logprobs = draw_tokens(logits, temperatures, _seeds(rows))
    wanted = torch.log_softmax(logits.double() / temperatures[:, None].double(), -1)
    torch.testing.assert_close(logprobs.double(), wanted.gather(1, tokens.long()[:, None])[:, 0], atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("columns", [50, 9_000])
def test_tokens_are_drawn_as_often_as_their_probability_says(columns):
    """Pearson's statistic of 400,000 draws over 50 groups of tokens: 49 degrees of freedom, below 100 but for once in
    40,000 times."""
    draws = 400_000
    torch.manual_seed(1)
    row = 2 * torch.randn(1, columns, device="cuda")
    counts = torch.zeros(columns, device="cuda", dtype=torch.float64)
    for _ in range(20):
        tokens, _ = draw_tokens(
            row.expand(draws // 20, columns), torch.full((draws // 20,), 1.3, device="cuda"), _seeds(draws // 20)
        )
        counts += torch.bincount(tokens, minlength=columns)
    expected = draws * torch.softmax(row[0].double() / 1.3, -1)
    groups = torch.arange(columns, device="cuda") % 50
    found, wanted = (
        torch.zeros(50, device="cuda", dtype=torch.float64).index_add(0, groups, one) for one in (counts, expected)
    )
    assert ((found - wanted) ** 2 / wanted).sum() < 100


def test_equal_seeds_draw_equal_tokens_whatever_is_beside_them():
    logits, seeds = torch.randn(64, 20_000, device="cuda"), _seeds(64)
    ones = torch.ones(64, device="cuda")
    together = draw_tokens(logits, ones, seeds)
    for row in (0, 17, 63):
        alone = draw_tokens(logits[row : row + 1], ones[:1], seeds[row : row + 1])
        assert all(torch.equal(one[row : row + 1], other) for one, other in zip(together, alone, strict=True))
    assert len(set(draw_tokens(logits[:1].expand(64, -1), ones, seeds)[0].tolist())) > 32


def test_what_is_excluded_is_never_drawn_and_what_is_broken_is_told():
    logits = torch.randn(4, 9_000, device="cuda")
    logits[0, 1:] = -math.inf
    logits[1, 8_000], logits[2, 5], logits[3] = math.nan, math.inf, -math.inf
    for _ in range(20):
        tokens, logprobs = draw_tokens(logits, torch.ones(4, device="cuda"), _seeds(4))
        assert tokens[0] == 0 and logprobs[0] == 0
        assert logprobs[1:].isnan().all()
        assert ((tokens >= 0) & (tokens < 9_000)).all()


@pytest.mark.parametrize("change", [{}, {"need_top_p_sampling": True}, {"is_all_greedy": True}], ids=str)
def test_sglang_draws_filtered_and_greedy_batches_itself(monkeypatch, change):
    monkeypatch.setattr(Sampler, "forward", Sampler.forward)
    asked: list[Any] = []
    monkeypatch.setattr(
        "rollout.sglang_patches.triton_draw.draw_tokens", lambda *them: asked.append(them) or draw_tokens(*them)
    )
    monkeypatch.setattr(
        "sglang.srt.layers.sampler.get_exec",
        lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch")),
    )
    plain_draw.install()
    rows, sampler = 8, Sampler.__new__(Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.enable_deterministic = sampler.use_ascend_backend = sampler.use_log_softmax_logprob = False
    sampler.rl_on_policy_target, sampler.output_logprob_processor = None, OutputLogprobProcessor()
    batch = SimpleNamespace(
        **{**PLAIN, **change},
        need_min_p_sampling=False,
        has_custom_logit_processor=False,
        return_sampling_masks=None,
        sampling_seed=None,
        grammars=None,
        temperatures=torch.full((rows, 1), 1.0 if change.get("is_all_greedy") else 0.8, device="cuda"),
        top_ks=torch.full((rows,), 1 << 30, device="cuda"),
        top_ps=torch.full((rows,), 0.5, device="cuda"),
        min_ps=torch.zeros(rows, device="cuda"),
    )
    logits = torch.randn(rows, 1000, device="cuda")
    output = SimpleNamespace(next_token_logits=logits.clone())
    tokens = sampler.forward(output, batch, True, [0] * rows, [None] * rows, None)
    wanted = torch.log_softmax(logits / batch.temperatures, -1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(output.next_token_logprobs, wanted, atol=1e-4, rtol=1e-4)
    assert len(asked) == (not change)
