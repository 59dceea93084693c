"""Whole runs whose generation is ahead of training, interrupted or in several turns: real engines, real actor."""

import json
import re
import shutil

import pytest
from run_support import UNTRACKED, metric_rows, run_arguments, run_command

from rlpipe.monitoring.report.history import read_history

_NO_EXTRAS = [*UNTRACKED, "algorithm.kl.coefficient=0", "eval.datasets=[]"]
_AGAINST_ROLLOUT = "algorithm.old_policy=rollout"
_AGAINST_ACTOR = "algorithm.correction.weight=token"


@pytest.mark.slow
def test_async_generates_ahead_and_never_trains_what_is_too_old(tmp_path):
    settings = ["rollout.mode=async", "rollout.max_staleness=2", "rollout.generate.function=calculator"]
    settings.append("rollout.sampling.temperature=0.8")
    output = run_command("train", *run_arguments(tmp_path, *_NO_EXTRAS, _AGAINST_ACTOR, *settings))
    assert "old log-probabilities: a pass where responses are older" in output
    rows = metric_rows(tmp_path / "small")[-4:]
    assert [row["rollout/samples_count"] for row in rows] == [32] * 4
    assert all(row["rollout/weight_version_lag_max"] <= 2 for row in rows)
    off_policy = [row for row in rows if row["rollout/off_policy_share"] > 0]
    assert off_policy
    assert all(row["time/old_logprob_seconds"] > 0 for row in off_policy)
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in rows if row not in off_policy)
    assert rows[0]["rollout/groups_started_count"] == 24


@pytest.mark.slow
def test_a_whole_run_trains_what_the_policy_wrote_around_the_calculator(tmp_path):
    template = "warm_start.response_template='<<{expression}>> = {label} Answer: {label}'"
    learned = ["warm_start.steps=150", "warm_start.sequences_per_step=128", template]
    settings = ["rollout.generate.function=calculator", *learned, "run.iterations=2"]
    run_command("train", *run_arguments(tmp_path, *_NO_EXTRAS, *settings, "rollout.max_response_tokens=48"))
    samples = [json.loads(line) for line in (tmp_path / "small/samples.jsonl").read_text().splitlines()]
    answered = [re.search(r"<<([\d+ ]+)>> = (\d+) ", sample["response"]) for sample in samples]
    assert any(answered)
    for match in filter(None, answered):
        assert sum(map(int, match[1].split("+"))) == int(match[2])
    for row in metric_rows(tmp_path / "small")[-2:]:
        assert row["train/updates_applied_count"] > 0
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["rollout/prefix_hit_share"] > 0.2  # a later turn finds the earlier ones


@pytest.mark.slow
def test_experts_of_the_engine_are_those_of_the_actor_in_a_whole_run(tmp_path):
    replay = ["algorithm.routing_replay=true", "run.iterations=2", f"model.path={tmp_path}/hybrid"]
    run_command("train", *run_arguments(tmp_path, *_NO_EXTRAS, *replay, config="configs/demo/hybrid.yaml"))
    for row in metric_rows(tmp_path / "small")[-2:]:
        assert row["train/updates_applied_count"] > 0
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["rollout/prefix_hit_share"] == 0  # no cache of recurrent states on a CPU


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Folder and settings of a run of two iterations that begins more responses than it waits for.

    All have 320 tokens. The first 40 of 64 suffice, and the others need as many steps once more, so that a busy machine
    has seconds to tell the engine.
    """
    folder = tmp_path_factory.mktemp("interrupted")
    more = ["rollout.oversampling=2", "rollout.partial=true", "rollout.engine.max_running_requests=40"]
    more += ["rollout.max_response_tokens=320", "rollout.sampling.ignore_eos=true"]
    settings = [*_NO_EXTRAS, _AGAINST_ROLLOUT, *more]
    run_command("train", *run_arguments(folder, *settings, "run.iterations=2"))
    return folder, settings


def test_interrupted_responses_go_on_in_the_next_iteration(interrupted):
    folder, _ = interrupted
    first, second = metric_rows(folder / "small")[-2:]
    assert first["rollout/samples_count"] == second["rollout/samples_count"] == 32
    assert first.get("rollout/samples_continued_count", 0) == first["rollout/off_policy_share"] == 0
    assert second["rollout/samples_continued_count"] > 0 and second["rollout/off_policy_share"] > 0


@pytest.mark.slow
def test_a_resumed_run_begins_the_prompts_of_interrupted_responses_again(interrupted, tmp_path):
    folder, settings = interrupted
    shutil.copytree(folder / "small", tmp_path / "small")
    places = [f"model.path={folder.parent}/small-policy", f"prepare.directory={folder.parent}/small-task"]
    run_command("train", *run_arguments(tmp_path, *settings, *places), "--resume")
    rows = metric_rows(tmp_path / "small")[-4:]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert rows[2].get("rollout/samples_continued_count", 0) == 0 < rows[3]["rollout/samples_continued_count"]
    assert all(row["rollout/samples_count"] == 32 for row in rows)


@pytest.mark.slow
def test_the_order_of_requests_changes_no_answer_and_prompts_that_recur_are_known(tmp_path):
    """Two engines with room for a quarter of the requests each."""
    settings = [*_NO_EXTRAS, "rollout.engines=2", "rollout.engine.max_running_requests=8", "warm_start=null"]
    settings += [
        "rollout.generate.function=tests.rlpipe.long_tail:write_drawn_length",
        "rollout.max_response_tokens=128",
    ]
    settings += ["rollout.sampling.ignore_eos=true", "prepare.arithmetic.train_problems=16"]
    settings += [f"prepare.directory={tmp_path}/rows", "checkpoint.save_hf=never"]
    found = {}
    for order in ("longest_first", "arrival"):
        run_command("train", *run_arguments(tmp_path, *settings, f"rollout.request_order={order}", f"run.name={order}"))
        found[order] = (tmp_path / order / "samples.jsonl").read_text(), read_history(tmp_path / order)
    assert found["longest_first"][0] == found["arrival"][0]
    for _, history in found.values():
        assert all(0 < row["rollout/tail_lost_share"] < 1 for row in history.trained)
        second_epoch = [group for record in history.responses[2:] for group in record.groups]
        known = [min(group.tokens) <= group.expected <= max(group.tokens) for group in second_epoch]
        assert sum(known) > 0.6 * len(known)
    assert "The tail" in (tmp_path / "arrival/report.html").read_text()


@pytest.mark.slow
def test_responses_that_moved_are_trained_as_the_engines_sampled_them(tmp_path):
    """Two engines that begin all of an iteration's responses at once, of which some become far longer than others."""
    settings = [*_NO_EXTRAS, "run.iterations=8", "rollout.engines=2", "rollout.engine.max_running_requests=32"]
    settings += ["rollout.generate.function=tests.rlpipe.long_tail:write_drawn_length", "warm_start=null"]
    settings += ["rollout.generate.options={median: 60, sigma: 1.5}", "rollout.max_response_tokens=512"]
    settings += ["rollout.engine.deterministic=false", "rollout.sampling.ignore_eos=true", "rollout.migration=true"]
    settings += ["prepare.arithmetic.train_problems=16", f"prepare.directory={tmp_path}/rows"]
    run_command("train", *run_arguments(tmp_path, *settings))
    rows = metric_rows(tmp_path / "small")[-8:]
    assert rows[0]["rollout/responses_moved_count"] == 0  # nothing is known of the engines' pace yet
    moved = [row for row in rows if row["rollout/responses_moved_count"]]
    assert moved and all(row["rollout/moved_tokens"] > 0 for row in moved)
    assert all(row["rollout/samples_count"] == 32 and row["mismatch/logprob_abs_mean"] < 1e-5 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rollout.mode=sync", "rollout.mode=async"])
def test_an_agent_s_episodes_are_trained_on_the_tokens_that_the_engine_sampled(tmp_path, mode):
    agent = ["rollout.generate.function=agent", "rollout.generate.agent.run=rlpipe.agents.example_agent:asks_twice"]
    settings = [*_NO_EXTRAS, _AGAINST_ACTOR, *agent, mode, "rollout.max_response_tokens=96"]
    run_command("train", *run_arguments(tmp_path, *settings, "algorithm.aggregation=episode_mean"))
    rows = metric_rows(tmp_path / "small")[-4:]
    assert all(row["rollout/episodes_count"] == 32 and row["rollout/failed_count"] == 0 for row in rows)
    assert sum(row["agent/continued_requests_count"] for row in rows) > 0
    assert all(row["agent/divergences_count"] == 0 for row in rows)
    assert any(row["episode/turns_max"] == 2 for row in rows)
    on_policy = [row for row in rows if row["rollout/off_policy_share"] == 0]
    assert on_policy and all(row["mismatch/logprob_abs_max"] < 1e-4 for row in on_policy)
