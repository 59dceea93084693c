"""An environment of verifiers, unchanged, against the policy's endpoint."""

import json
import signal
from importlib.util import find_spec

import pytest
from scripted_policy import ScriptedPolicy, text_of, trained_text

from rlpipe.config.root import Config
from rlpipe.environments.adapters.verifiers_agent import write_rows
from rlpipe.generation.episode_makers import episode_maker
from rlpipe.generation.event_loop import BackgroundLoop
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.sample import Prompt
from rollout.partial_response import PartialResponse
from rollout.requests import SamplingParameters

pytestmark = pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed")
GAME = "verifiers_game:load_environment"


def config_of(**options) -> Config:
    run = "rlpipe.environments.adapters.verifiers_agent:verifiers_episode"
    agent = {"run": run, "options": {"environment": GAME, **options}}
    return Config.model_validate(
        {
            "run": {"name": "verifiers", "iterations": 1},
            "model": {"path": "policy"},
            "data": {"train": [{"name": "data", "path": "unused"}], "max_prompt_tokens": 1024},
            "rollout": {"max_response_tokens": 1024, "generate": {"function": "agent", "agent": agent}},
        }
    )


def test_an_environment_runs_unchanged_and_its_rubric_grades_what_is_trained_token_by_token(tokenizer):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call><end>'
    policy = ScriptedPolicy(tokenizer, call, "it is 42<end>")
    columns = {"prompt": [{"role": "user", "content": "double 21"}], "example_id": 0, "info": {"number": 21}}
    prompt = Prompt("data/0", "rendered", (1,), "42", "data", columns)
    maker, loop = episode_maker(config_of(arguments={"goal": "42"})), BackgroundLoop("test")
    try:
        maker.open(policy, tokenizer, 0)
        request = PromptRequest("g-000", "g", prompt, SamplingParameters(1024))
        (sample,) = loop.submit(maker.make(request, PartialResponse())).result(120).episode
    finally:
        maker.close()
        loop.close()
    assert sample.reward.score == 1.25  # right, and an eighth for each of two turns
    assert trained_text(sample, tokenizer) == f"{call}it is 42<end>".replace("<end>", "<|im_end|>")
    assert "42" in text_of(sample, tokenizer).partition("</tool_call>")[2].partition("it is")[0]
    assert [turn.end - turn.start for turn in sample.turns] == [len(call) - 4, 9]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_an_environments_data_sets_become_rows(tmp_path):
    assert write_rows(GAME, tmp_path, {"system_prompt": "be brief"}) == {"train": 2, "test": 1}
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [row["example_id"] for row in rows] == [0, 1]
    assert rows[1]["prompt"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "double 7"},
    ]
    assert (rows[1]["label"], rows[1]["info"]) == ("42", {"number": 7})
    with pytest.raises(ConfigError, match="cannot import"):
        write_rows("no_such_game:load_environment", tmp_path)
