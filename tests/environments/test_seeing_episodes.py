"""What is told of episodes: metrics, transcripts, the report's page, `rlpipe replay` and `rlpipe env check`."""

import asyncio
import json
from dataclasses import replace

import pytest
from scripted_policy import ScriptedPolicy, conversation_of
from typer.testing import CliRunner

from rlpipe.cli import app
from rlpipe.config.environment import EnvironmentConfig
from rlpipe.environments.episode import environment_function
from rlpipe.monitoring.json_lines import append_json_line
from rlpipe.monitoring.metric_dictionary import check_names
from rlpipe.monitoring.report.episodes import episode_articles
from rlpipe.monitoring.transcripts import transcripts
from rlpipe.shared.sample import Reward
from rlpipe.shared.turn import Outcome, ToolUse, Turn
from rlpipe.training.episode_metrics import episode_metrics

SETTINGS = {"name": "search", "format": "text", "tool_format": "brackets"}


@pytest.fixture(scope="module")
def episodes(tokenizer):
    """Two of a search with a failed call each, one of two agents, one response of a single turn."""
    found = []
    for number, answer in enumerate(("Arl", "nothing <b>")):
        texts = ("<<Ada Ash>>", "<<who: knows>>", f"Answer: {answer}<end>")
        row = {"label": "Arl"}
        conversation = conversation_of(ScriptedPolicy(tokenizer, *texts), "?", 800, row, f"g-00{number}")
        asyncio.run(environment_function(EnvironmentConfig(**SETTINGS), 64)(conversation))
        found.append(conversation.episode())
    row = {"label": "3", "task": "3;"}
    conversation = conversation_of(ScriptedPolicy(tokenizer, "x", "3"), ":", 64, row, "g-002")
    config = EnvironmentConfig(name="signals", format="text", max_turn_tokens=1)
    asyncio.run(environment_function(config, 64)(conversation))
    found.append(conversation.episode())
    single = conversation_of(ScriptedPolicy(tokenizer, "one<end>"), "?", 64, sample_id="g-003")
    asyncio.run(single.write())
    found.append(single.episode())
    return [tuple(replace(sample, reward=Reward(0.5, True, "why")) for sample in episode) for episode in found]


def test_metrics_tell_of_turns_tools_and_states(episodes):
    metrics = episode_metrics(episodes)
    check_names(metrics)
    assert metrics["episode/turns_mean"] == pytest.approx((3 + 3 + 2 + 1) / 4)  # the single turn is an episode, too
    assert (metrics["episode/tool_calls_count"], metrics["episode/tool_failures_unknown_count"]) == (4, 2)
    assert metrics["episode/success_share"] == pytest.approx(2 / 3)
    assert (metrics["episode/ended_done_count"], metrics["episode/trained_share"]) == (3, 1)
    assert (metrics["episode/state_calls_mean"], metrics["episode/state_right_share_mean"]) == (2, 1)
    assert episode_metrics(episodes[3:]) == {}


def test_metrics_of_turns_and_tools_by_hand(episodes):
    first, second, *_ = episodes
    uses = ToolUse("find", 0.5), ToolUse("find", 4.0, "timeout", retries=2, cut=True), ToolUse("add", 1.0, "error")
    turns = Turn(0, 2, 0, model_seconds=1.0, tool_seconds=5.0, tools=uses[:2]), Turn(2, 5, 1, model_seconds=2.0)
    more = (Turn(0, 3, 0, model_seconds=4.0, tool_seconds=1.0, tools=uses[2:]),)
    states = {"score": 3, "share": 0.5, "won": True, "name": "x", "no name": 7}, {"score": 5}
    changed = [
        (
            replace(
                episode[0],
                turns=taken,
                loss_mask=(1, 0) + (0,) * (len(episode[0].loss_mask) - 2),
                outcome=Outcome(len(taken), success=number == 0, state=state, ended="done", cleanup_failed=number == 1),
            ),
        )
        for number, (episode, taken, state) in enumerate(zip((first, second), (turns, more), states, strict=True))
    ]
    metrics = episode_metrics(changed)
    check_names(metrics)
    assert metrics == {
        "episode/turns_mean": 1.5,
        "episode/turns_max": 2.0,
        "episode/model_mean_seconds": 3.5,
        "episode/tool_mean_seconds": 3.0,
        "episode/trained_share": 2 / 8,
        "episode/tool_calls_count": 3.0,
        "episode/tool_failures_count": 2.0,
        "episode/tool_failures_timeout_count": 1.0,
        "episode/tool_failures_error_count": 1.0,
        "episode/tool_call_max_seconds": 4.0,
        "episode/tool_retries_count": 2.0,
        "episode/cut_answers_count": 1.0,
        "episode/special_text_answers_count": 0.0,
        "episode/success_share": 0.5,
        "episode/ended_done_count": 2.0,
        "episode/cleanup_failures_count": 1.0,
        "episode/state_score_mean": 4.0,
        "episode/state_share_mean": 0.5,
        "episode/state_won_mean": 1.0,
    }


def test_a_transcript_holds_every_token_once_and_the_page_escapes_what_was_written(episodes, tokenizer):
    samples = [sample for episode in episodes for sample in episode]
    rows = transcripts(samples, 9, lambda ids: tokenizer.decode(list(ids)))
    assert [row["episode"] for row in rows] == ["g-000", "g-001", "g-002"]  # and not the single turn
    assert len(transcripts(samples, 2, str)) == 2
    written = [sequence for row in rows for sequence in row["sequences"]]
    for sequence, sample in zip(written, samples, strict=False):
        segments = sequence["segments"]
        assert "".join(segment["text"] for segment in segments) == tokenizer.decode(list(sample.response_ids))
        assert sum(segment["tokens"] for segment in segments) == sample.response_tokens
        assert sum(segment["trained_tokens"] for segment in segments) == sample.trained_tokens
    page = episode_articles([{"iteration": 3, **json.loads(json.dumps(row))} for row in rows])
    assert "nothing &lt;b&gt;" in page and "<b>nothing" not in page and "nothing <b>" not in page
    assert "2 sequences" in page and "who unknown" in page and page.count("<details") == 3
    assert episode_articles([{"episode": 1, "sequences": [{"segments": [7]}, 8], "outcome": 3}])  # damaged, not fatal


def test_replay_prints_an_episode_and_names_those_that_there_are(episodes, tokenizer, tmp_path):
    samples = [sample for episode in episodes for sample in episode]
    for row in transcripts(samples, 9, lambda ids: tokenizer.decode(list(ids))):
        append_json_line(tmp_path / "episodes.jsonl", {"iteration": 7, **row})
    run = CliRunner().invoke
    told = run(app, ["replay", str(tmp_path), "g-002"]).output
    assert "[turn 0, sender, 1 of 1 tokens trained, reward 1, model 0.25 s" in told
    assert "--- sequence g-002.receiver (completed)" in told
    assert "ended by done after 2 turns, success True" in told
    assert run(app, ["replay", str(tmp_path)]).output.count("iteration 7") == 3
    wrong = run(app, ["replay", str(tmp_path), "g-00"])
    assert (wrong.exit_code, "3 episodes are called 'g-00'; there are g-000, g-001, g-002" in wrong.output) == (2, True)


def test_an_environment_is_tried_without_a_model(tmp_path):
    settings = [f"prepare.directory={tmp_path}/rows", f"model.path={tmp_path}/policy", "prepare.tasks.train=9"]
    said = ["--say", "<<1+2>>", "--say", "Answer: 3", "--episodes", "3"]
    told = CliRunner().invoke(app, ["env", "check", "configs/demo/calculator.yaml", *settings, *said])
    assert told.exit_code == 0, told.output
    assert "tool calculate: The value of a sum" in told.output
    assert "calculate: ok in" in told.output
    assert "episode 2: 2 turns in" in told.output
    broken = "rollout.generate.environment.options.operands=1"
    failed = CliRunner().invoke(app, ["env", "check", "configs/demo/calculator.yaml", *settings, broken])
    assert (failed.exit_code, "1 operands of 2 digits" in failed.output) == (2, True)
    odd = CliRunner().invoke(app, ["env", "check", "configs/demo/calculator.yaml", *settings, "--say", "a\udcff"])
    assert (odd.exit_code, "--say 'a\\udcff' is not text in UTF-8" in odd.output) == (2, True)
    without = CliRunner().invoke(app, ["env", "check", "configs/demo/arithmetic.yaml"])
    assert (without.exit_code, "there is nothing to try" in without.output) == (2, True)
