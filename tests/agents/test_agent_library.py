"""An agent library from PyPI, unmodified, makes an episode; what is trained is what was sampled."""

import json

from random_policy_engine import RandomPolicy, assert_trained_once_as_sampled
from test_agent_maker import Maker, config_of, request_of


def calls(name: str, **arguments) -> str:
    """The rest of a call that the endpoint began: this library sets `tool_choice` to `required`."""
    return f"{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Adds(RandomPolicy):
    """Writes what a policy would that knows how to add with the library's tools."""

    def text(self, numbers):
        return calls("add", first=17, second=25) if not self.written else calls("final_answer", answer="42")

    def broken_text(self, numbers):
        return []


def room(run: str, **options):
    config = config_of(run=run, **options)
    return config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_tokens": 40_000})})


def test_a_library_s_agent_runs_its_tools_and_its_way_to_write_history_is_told(tokenizer):
    policy = Adds(tokenizer)
    with Maker(tokenizer, policy, room("library_agent:with_smolagents")) as maker:
        episode = maker.make().episode
        metrics, notes = maker.maker.take_metrics(), maker.maker.take_notes()
    assert episode[-1].response_text == "42"
    assert metrics["agent/tool_calls_count"] == metrics["agent/requests_count"] == 2
    # This library writes the calls of earlier turns as text of its own, so each turn reads another history.
    assert len(episode) == 2 and metrics["agent/divergences_count"] == len(notes) == 1
    assert "was assistant" in notes[0] and "Calling tools" in notes[0]
    assert_trained_once_as_sampled(episode, policy.written)


def test_a_library_s_agent_with_a_policy_that_writes_anything(tokenizer):
    policy = RandomPolicy(tokenizer)
    with Maker(tokenizer, policy, room("library_agent:with_smolagents", failure_reward=0.0)) as maker:
        for number in range(5):
            begun = len(policy.written)
            episode = maker.make(request_of(f"g-{number:03d}")).episode
            assert_trained_once_as_sampled(episode, policy.written[begun:])
        assert maker.maker.take_metrics()["agent/requests_count"] == len(policy.written) > 5
