"""The benchmark compares an environment with an agent that plays it: both are shown the same tokens."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

import rewards
from benchmarks.agent_learning import WAYS, equal_iterations, learned
from rewards import facts_of
from rlpipe.algorithms import compute_advantages
from rlpipe.config.load import load_config
from rlpipe.environments.tasks.grid import Grid
from rlpipe.generation.episode_makers import episode_maker
from rlpipe.generation.event_loop import BackgroundLoop
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.sample import Prompt, Status, VersionSpan
from rollout.partial_response import PartialResponse
from rollout.requests import Generation, SamplingParameters

MOVES = "nesw"


class Walker:
    """Writes one token that follows from the request's seed: mostly a move, also half a character or a marker."""

    def __init__(self, tokenizer) -> None:
        self.moves = tokenizer(MOVES * 4, add_special_tokens=False)["input_ids"]
        self.end = tokenizer.eos_token_id
        self.others = [*range(250, 256), *tokenizer.all_special_ids, 300]

    async def generate(self, request):
        numbers = random.Random(request.seed)
        token = numbers.choice(numbers.choice([self.moves] * 9 + [self.others]))
        status = Status.COMPLETED if token == self.end else Status.TRUNCATED
        return Generation(request.request_id, (token,), (-1.0,), status, (VersionSpan(0, 1),), 0, 0.0, 0)


def played(tmp_path: Path, way: str) -> list:
    file = tmp_path / f"{way}.yaml"
    file.write_text(f"base: {Path('configs/demo/grid.yaml').resolve()}\n{WAYS[way]}")
    config, tokenizer = load_config(file, []), byte_tokenizer()
    maker, loop = episode_maker(config), BackgroundLoop("test")
    maker.open(Walker(tokenizer), tokenizer, 0)
    try:
        made = []
        for number, row in enumerate(Grid().tasks(12, 0)):
            token_ids = tuple(tokenizer(row["prompt"], add_special_tokens=False)["input_ids"])
            prompt = Prompt(f"grid/{number}", row["prompt"], token_ids, row["label"], "grid", row)
            request = PromptRequest(f"g-{number}", f"g{number % 3}", prompt, SamplingParameters(96))
            made.append(loop.submit(maker.make(request, PartialResponse())))
        return [one.result(60).episode for one in made]
    finally:
        maker.close()
        loop.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_of_an_environment_and_of_an_agent_that_plays_it_are_equal_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    environment, endpoint = (learned(tmp_path, way, seed=0, iterations=3) for way in WAYS)
    assert equal_iterations(environment.curve, endpoint.curve) == len(environment.curve) == 3
    assert all(None not in row[:-1] for row in environment.curve)
    assert environment.held_out == endpoint.held_out


def reward_of(sample):
    return rewards.grade("environment", "", "", environment=facts_of(sample)["environment"])


def trained(episodes) -> list[tuple[float, ...]]:
    """Advantages of the tokens, as the run computes them."""
    config = load_config(Path("configs/demo/grid.yaml"), [])
    graded = [replace(one, reward=one.reward or reward_of(one)) for one in episodes]
    result = compute_advantages(graded, config.algorithm, max_response_tokens=96)
    return [sample.token_advantages for sample in result.samples]


def test_an_agent_draws_sees_and_is_credited_as_the_environment_is(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    environment, endpoint = ([one for (one,) in played(tmp_path, way)] for way in ("environment", "endpoint"))
    for direct, served in zip(environment, endpoint, strict=True):
        assert (direct.prompt.token_ids, direct.response_ids) == (served.prompt.token_ids, served.response_ids)
        assert (direct.loss_mask, direct.rollout_logprobs) == (served.loss_mask, served.rollout_logprobs)
        assert [turn.reward for turn in direct.turns] == [turn.reward for turn in served.turns]
        assert served.reward.correct == direct.outcome.success
    assert {sample.outcome.ended for sample in environment} == {"done", "turns"}
    advantages = trained(environment)
    assert any(any(one) for one in advantages)
    for one, other in zip(advantages, trained(endpoint), strict=True):
        assert one == pytest.approx(other)
