"""The worked examples, played by scripted policies: what they answer, earn and tell."""

import asyncio
import json
import re

import pytest
from scripted_policy import ScriptedPolicy, conversation_of, text_of, trained_text

import rewards
from rewards.sandbox.program import Limits, Program, namespaces_work, run_tests
from rlpipe.config.environment import EnvironmentConfig
from rlpipe.environments.environment_registry import task_rows
from rlpipe.environments.episode import environment_function
from rlpipe.environments.tasks.repair import _PROGRAMS
from rlpipe.shared.errors import ConfigError, DataError


def played(tokenizer, name, row, *texts, options=None, limit=2000, **settings):
    """The samples of an episode of the environment `name` on `row`, with the reward of the grader `environment`."""
    config = EnvironmentConfig(name=name, options=options or {}, **settings)
    conversation = conversation_of(ScriptedPolicy(tokenizer, *texts), row["prompt"], limit, row)
    asyncio.run(environment_function(config, 512)(conversation))
    episode = conversation.episode()
    reward = rewards.grade("environment", "", "", environment=rewards.facts_of(episode[-1])["environment"])
    return episode, reward


def test_the_grid_rewards_each_turn_by_whether_it_comes_nearer(tokenizer):
    row = {"prompt": "00>12", "label": "12", "task": "0012"}
    options = {"size": 4, "step_reward": 0.25, "goal_reward": 2.0}
    (sample,), reward = played(
        tokenizer, "grid", row, "e", "w", "?", "n", "e", "s", "s", options=options, format="text", max_turn_tokens=1
    )
    assert [turn.reward for turn in sample.turns] == [0.25, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25]
    assert text_of(sample, tokenizer) == "e 10>12w 00>12? 00>12n 00>12e 10>12s 11>12s"
    assert trained_text(sample, tokenizer) == "ew?ness"
    assert (reward.score, reward.correct) == (2.25, True)
    assert sample.outcome.state == {"turns": 7, "distance": 0, "detour": 4}


def test_a_calculation_takes_pairs_and_ends_in_an_answer(tokenizer):
    row = {"prompt": "12+30+7=?", "label": "49", "expression": "12+30+7"}
    settings = {"format": "text", "tool_format": "brackets", "options": {"call_reward": 0.25}}
    (sample,), reward = played(
        tokenizer, "calculation", row, "<<12+30>>", "<<42+7+1>>", "<<42+7>>", " Answer: 49<end>", **settings
    )
    assert text_of(sample, tokenizer) == "<<12+30>> = 42 <<42+7+1>> = ? <<42+7>> = 49  Answer: 49<|im_end|>"
    assert [turn.reward for turn in sample.turns] == [0.25, 0.0, 0.25, None]
    assert (reward.score, reward.correct) == (1.5, True)
    _, reward = played(tokenizer, "calculation", row, "Answer: 48<end>", **settings)
    assert (reward.score, reward.correct) == (0.0, False)


def test_generated_tasks_are_different_recur_and_can_be_solved_as_they_say(tokenizer):
    config = EnvironmentConfig(
        name="calculation", options={"operands": 3, "digits": 1}, format="text", tool_format="brackets"
    )
    train, test = (list(rows) for rows in task_rows(config, 60, 20, seed=3))
    assert (train, test) == tuple(list(rows) for rows in task_rows(config, 60, 20, seed=3))
    operands = [tuple(sorted(row["prompt"].removesuffix("=?").split("+"))) for row in (*train, *test)]
    assert len(set(operands)) == 80
    texts = re.findall(r"<<.*?>>|Answer: .*", test[0]["steps"])
    texts[-1] += "<end>"
    _, reward = played(
        tokenizer, "calculation", test[0], *texts, options=config.options, format="text", tool_format="brackets"
    )
    assert (reward.correct, len(texts)) == (True, 3)
    with pytest.raises(ConfigError, match="makes only 220"):
        task_rows(config, 300, 20, seed=3)


def test_two_agents_have_a_sequence_each_and_share_the_reward(tokenizer):
    row = {"prompt": ":", "label": "21", "task": "21;"}
    (sender, receiver), reward = played(tokenizer, "signals", row, "b", "2", "y", "0", format="text", max_turn_tokens=1)
    assert text_of(sender, tokenizer) == " 2<b 1<y"
    assert text_of(receiver, tokenizer) == " b>2 ->0"
    assert [turn.reward for turn in sender.turns] == [1.2, 0.0]
    assert [turn.reward for turn in receiver.turns] == [1.0, 0.0]
    assert [turn.number for turn in (*sender.turns, *receiver.turns)] == [0, 2, 1, 3]
    assert {turn.agent for turn in receiver.turns} == {"receiver"}
    assert (sender.episode, sender.sample_id) == (receiver.episode, "g-0")
    assert (sender.outcome, reward.correct) == (receiver.outcome, False)
    assert receiver.outcome.state == {"right_share": 0.5}


def test_a_question_of_two_hops_is_answered_by_searching_twice(tokenizer):
    config = EnvironmentConfig(name="search", format="text", tool_format="brackets")
    rows, _ = task_rows(config, 150, 1, seed=0)
    row = next(row for row in rows if "teacher" in row["prompt"])
    texts = re.findall(r"<<.*?>>|Answer: .*", row["steps"])
    assert (len(texts), texts[-1]) == (3, f"Answer: {row['label']}")
    texts[-1] += "<end>"
    (sample,), reward = played(
        tokenizer, "search", row, *texts, options={"passages": 1}, format="text", tool_format="brackets"
    )
    assert reward.correct
    assert row["label"] in text_of(sample, tokenizer).partition(texts[1])[2].partition("Answer")[0]


def test_a_corpus_of_files_is_searched_by_rarity_of_words(tokenizer, tmp_path):
    (tmp_path / "a.md").write_text("The heron stands in the water.\n\nThe stork flies over the water.\n")
    (tmp_path / "b.txt").write_text("Water and the water and the water.")
    rows = [{"title": "birds", "text": "a stork"}, {"text": "nothing"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = '<tool_call>{"name": "search", "arguments": {"query": "stork, water"}}</tool_call><end>'
    row = {"prompt": "?", "label": '["Stork", "a heron"]'}
    (sample,), reward = played(
        tokenizer, "search", row, call, "the heron!<end>", options={"corpus": str(tmp_path), "passages": 2}
    )
    told = text_of(sample, tokenizer)
    assert told.index("The stork flies") < told.index("Water and the water") and "stands" not in told
    assert reward.correct
    (sample,), _ = played(tokenizer, "search", row, call, "none<end>", options={"corpus": str(tmp_path / "c.jsonl")})
    assert "birds: a stork" in text_of(sample, tokenizer)
    with pytest.raises(DataError, match="holds no text"):
        played(tokenizer, "search", row, options={"corpus": str(tmp_path / "no")})


@pytest.mark.skipif(not namespaces_work(), reason="this machine permits no namespaces")
def test_a_program_is_read_tried_changed_and_judged_in_the_sandbox(tokenizer):
    def call(name, **arguments):
        return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"

    row = {
        "prompt": "add subtracts",
        "label": "-",
        "source": "def add(a, b):\n    return a - b\n",
        "tests": "assert add(2, 3) == 5\nassert add(-1, 1) == 0",
    }
    texts = (
        call("show") + call("run", code="print(add(2, 3))") + "<end>",
        call("replace", old="nowhere", new="") + call("replace", old="a - b", new="a + b") + "<end>",
        "add now adds<end>",
    )
    (sample,), reward = played(tokenizer, "repair", row, *texts, options={"wall_seconds": 60.0}, limit=4000)
    told = text_of(sample, tokenizer)
    assert "return a - b" in told and "-1\nexit code 0" in told
    assert "the text to replace stands in the program 0 times" in told
    assert (reward.correct, sample.outcome.state["edits"], sample.outcome.state["tries"]) == (True, 1, 1)
    _, reward = played(tokenizer, "repair", row, "it is fine<end>")
    assert reward.correct is False


@pytest.mark.skipif(not namespaces_work(), reason="this machine permits no namespaces")
def test_every_generated_fault_is_one_and_can_be_repaired(tokenizer):
    train, test = task_rows(EnvironmentConfig(name="repair"), 13, 4, seed=0)
    rows = [*train, *test]
    assert len({row["source"] for row in rows}) == 17
    for row in rows[::6]:
        _, reward = played(tokenizer, "repair", row, "done<end>", options={"wall_seconds": 60.0})
        assert reward.correct is False, row["source"]
    for source, tests, faults in _PROGRAMS:
        program = Program(source)
        assert all(source.replace(right, wrong, 1) != source for right, wrong in faults)
        assert run_tests(program, tests, Limits(wall_seconds=60.0)).exit_code == 0, source
