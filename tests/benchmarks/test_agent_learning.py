"""The benchmark compares an environment with an agent that plays it: both are shown the same tokens."""

import random
from pathlib import Path

import pytest

from benchmarks.agent_learning import WAYS
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
    """Writes one token that follows from all tokens that it sees: mostly a move, also half a character or a marker."""

    def __init__(self, tokenizer) -> None:
        self.moves = tokenizer(MOVES * 4, add_special_tokens=False)["input_ids"]
        self.end = tokenizer.eos_token_id
        self.others = [*range(250, 256), *tokenizer.all_special_ids, 300]

    async def generate(self, request):
        numbers = random.Random(str(request.prompt_ids))
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
            request = PromptRequest(f"g{number}-0", f"g{number}", prompt, SamplingParameters(96))
            made.append(loop.submit(maker.make(request, PartialResponse())))
        return [one.result(60).episode for one in made]
    finally:
        maker.close()
        loop.close()


def test_an_agent_is_shown_what_the_environment_shows_and_its_turns_earn_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    environment, endpoint = (played(tmp_path, way) for way in ("environment", "endpoint"))
    for (direct,), (served,) in zip(environment, endpoint, strict=True):
        assert (direct.prompt.token_ids, direct.response_ids) == (served.prompt.token_ids, served.response_ids)
        assert direct.loss_mask == served.loss_mask
        rewards = [[turn.reward for turn in sample.turns] for sample in (direct, served)]
        assert rewards[0] == rewards[1]
        assert served.reward.score == pytest.approx(direct.outcome.reward + direct.outcome.turn_rewards)
        assert served.reward.correct == direct.outcome.success
    assert {sample.outcome.ended for (sample,) in environment} == {"done", "turns"}
