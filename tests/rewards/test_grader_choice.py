"""Names, dotted paths, options and columns: found at start or refused with a sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rewards
from rewards.chooser import GraderChooser, GraderSpec
from rewards.grading_pool import Failures
from rewards.reward_metrics import graded_table, summarize
from rlpipe.config.data import DatasetConfig
from rlpipe.config.reward import RewardConfig
from rlpipe.monitoring.metric_dictionary import check_names
from rlpipe.shared.errors import ConfigError, DataError
from rlpipe.shared.sample import Prompt, Reward, Sample, Status


@pytest.fixture(autouse=True)
def _graders_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_importing_and_grading_need_neither_torch_nor_ray() -> None:
    program = (
        "import sys, rewards, rewards.grading_pool, rewards.chooser, rewards.reward_metrics\n"
        "for name in rewards.GRADERS: rewards.grader_registry.find_grader(name)\n"
        "rewards.grade('math', r'\\boxed{\\frac{1}{2}}', '0.5')\n"
        "print([name for name in ('torch', 'ray', 'sglang', 'megatron') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout == "[]\n"


def test_a_grader_of_ones_own() -> None:
    rewards.check_grader("misbehaving:echo", {})
    assert rewards.grade("misbehaving:echo", "abc", "2.5").score == 2.5
    number = rewards.grade("misbehaving:plain_number", "", "")
    assert (number.score, number.correct) == (0.25, None)
    with pytest.raises(ValueError, match="finite"):
        rewards.grade("misbehaving:echo", "", "nan")


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("mth", {}, "grader 'mth' is unknown: use one of code, "),
        ("no_such_module:grader", {}, "cannot import 'no_such_module'"),
        ("misbehaving:no_such_function", {}, "has no 'no_such_function'"),
        ("misbehaving:__name__", {}, "is a str, not a function"),
        ("misbehaving:without_label", {}, "too many positional arguments"),
        ("math", {"windw": 1}, "unexpected keyword argument 'windw'"),
        ("length", {"buffer_tokens": 1}, "missing a required argument: 'maximum_tokens'"),
        ("ifeval", {"score": "most"}, "grader 'ifeval': option score: input should be 'all' or 'share', got 'most'"),
        ("code", {"wall_seconds": "6 s"}, "option wall_seconds: input should be a valid number"),
        ("code", {"wall_seconds": -1}, "option wall_seconds: input should be greater than 0"),
        ("code", {"memory_bytes": 1}, "option memory_bytes: input should be greater than or equal to 67108864"),
        ("f1", {"threshold": 5}, "option threshold: input should be less than or equal to 1"),
        ("length", {"maximum_tokens": 9, "buffer_tokens": 0}, "option buffer_tokens: input should be greater than 0"),
        ("weighted", {"parts": [{"name": []}]}, "name: input should be a valid string"),
        ("weighted", {"parts": [{"name": "math", "weight": "x"}]}, "weight: input should be a valid number"),
    ],
)
def test_wrong_graders_are_refused_at_start(name: str, options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        rewards.check_grader(name, options)
    with pytest.raises(ConfigError, match="reward: "):
        GraderChooser(RewardConfig(name=name, options=options), [])


def prompt(dataset: str, **metadata: object) -> Prompt:
    return Prompt("p", "question", (1,), "5", dataset, metadata)


def test_the_row_chooses_before_the_data_set_and_that_before_the_run() -> None:
    strict = {"name": "gsm8k", "options": {"strict": True}}
    config = RewardConfig(name="math", column="grader", graders={"strict": strict})
    datasets = [
        DatasetConfig(name="plain", path="a.jsonl"),
        DatasetConfig(name="words", path="b.jsonl", reward="f1"),
        DatasetConfig(name="school", path="c.jsonl", reward="strict"),
    ]
    chooser = GraderChooser(config, datasets)
    assert chooser.choose(prompt("plain")) == GraderSpec("math")
    assert chooser.choose(prompt("words")) == GraderSpec("f1")
    assert chooser.choose(prompt("school")) == GraderSpec("gsm8k", {"strict": True})
    assert chooser.choose(prompt("words", grader="dapo")) == GraderSpec("dapo")
    assert chooser.choose(prompt("words", grader="strict")) == GraderSpec("gsm8k", {"strict": True})
    assert chooser.choose(prompt("words", grader="")) == GraderSpec("f1")
    for name in ("unknown", "os:system"):
        with pytest.raises(DataError, match=name):
            chooser.choose(prompt("plain", grader=name))


def test_the_runs_grader_and_one_of_its_own_have_their_options() -> None:
    mine = {"name": "gsm8k", "options": {"strict": True}}
    config = RewardConfig(name="dapo", options={"window_characters": 9}, graders={"mine": mine})
    chooser = GraderChooser(config, [DatasetConfig(name="d", path="d.jsonl")])
    assert chooser.choose(prompt("d")) == GraderSpec("dapo", {"window_characters": 9})
    chooser = GraderChooser(RewardConfig(name="mine", graders={"mine": mine}), [DatasetConfig(name="d", path="d")])
    assert chooser.choose(prompt("d")) == GraderSpec("gsm8k", {"strict": True})


def test_named_graders_and_data_sets_are_checked_at_start() -> None:
    with pytest.raises(ConfigError, match=r"reward\.graders\.mine"):
        GraderChooser(RewardConfig(graders={"mine": {"name": "nothing"}}), [])
    with pytest.raises(ConfigError, match="data set 'd'"):
        GraderChooser(RewardConfig(), [DatasetConfig(name="d", path="d.jsonl", reward="nothing")])
    with pytest.raises(ConfigError, match="give the options there"):
        GraderChooser(RewardConfig(name="mine", options={"a": 1}, graders={"mine": {"name": "math"}}), [])


def test_metrics_are_declared_and_averaged_over_those_that_have_them() -> None:
    graded = [
        Reward(1.0, True, "", {"format": 1.0, "length": -0.5}),
        Reward(0.0, False, "", {"format": 0.0}),
        Reward(0.0, None, "grading took longer than 1 seconds"),
    ]
    metrics = summarize(graded, Failures(timeouts=("s2",)))
    check_names(metrics)
    assert metrics == {
        "reward/timeouts_count": 1.0,
        "reward/errors_count": 0.0,
        "reward/format_share": 0.5,
        "reward/length_mean": -0.5,
    }


def sample(number: int) -> Sample:
    reward = Reward(1.0, True, "equal", {"format": 1.0})
    return Sample(
        f"s{number}", "g", prompt("d"), (1, 2), "five", (0.0, 0.0), (1, 1), (), Status.TRUNCATED, 0, reward=reward
    )


def test_a_table_of_graded_samples_is_spread_over_all() -> None:
    rows = graded_table([sample(number) for number in range(10)], rows=3)
    assert [row["sample_id"] for row in rows] == ["s0", "s3", "s6"]
    assert rows[0] | {"prompt": "question", "response": "five", "label": "5", "reason": "equal"} == rows[0]
    json.dumps(rows)


def test_facts_of_a_sample() -> None:
    facts = rewards.facts_of(sample(1))
    assert facts == {"response_tokens": 2, "truncated": True, "prompt": "question", "metadata": {}}
