"""What drafts must bring by the model of `rlpipe plan`, beside recorded runs."""

import json
import re
from pathlib import Path

import pytest

from rlpipe.commands.cards.record_file import read_record
from rlpipe.commands.clusters import load_cluster
from rlpipe.config.draft import DraftConfig
from rlpipe.config.load import load_config
from rlpipe.estimate.decoding import BREAK_EVEN_WITHIN, EnginePass, break_even_tokens
from rlpipe.estimate.memory import load_model
from rlpipe.prepare.tiny_policy import make_tiny_policy
from rlpipe.training.summaries import draft_warnings

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROW = re.compile(r"^ +(?P<requests>\d+)  mtp +[\d,]+ +(?P<ratio>[\d.]+) +(?P<tokens>[\d.]+)$", re.MULTILINE)
STEPS = 3
LIMIT = re.compile(r"(\d+) tokens each")


@pytest.mark.parametrize(("name", "at_most"), [("rollout_drafts", 1.2), ("draft_learning", BREAK_EVEN_WITHIN)])
def test_the_model_asks_for_little_less_than_was_recorded_and_for_no_more_than_warnings_allow(recorded, model, at_most):
    """The speeds of drafting are fitted to the first record."""
    cluster = load_cluster("local_1x141gb")
    (tokens,) = map(int, LIMIT.findall(recorded.output))
    found = {int(row["requests"]): float(row["tokens"]) / float(row["ratio"]) for row in ROW.finditer(recorded.output)}
    assert len(found) == 3
    for requests, measured in found.items():
        work = EnginePass(requests, tokens / 2, attention="triton")  # as it was recorded; prompts are short
        planned = break_even_tokens(model, cluster, 1, DraftConfig(method="mtp", steps=STEPS), work)
        print(f"{requests} requests: {planned:.2f} tokens planned, {measured:.2f} measured")
        assert 0.8 * measured <= planned <= at_most * measured


@pytest.fixture
def recorded(name):
    return read_record(BENCHMARKS / f"results/{name}.cuda.json")


@pytest.fixture
def model(recorded, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from layer_shapes import hybrid_config

    words = recorded.command.split()
    if "--hybrid-layers" in words:
        layers = int(words[words.index("--hybrid-layers") + 1])
        (tmp_path / "config.json").write_text(json.dumps(hybrid_config(layers, 32768, tiny=False)))
    else:
        make_tiny_policy(load_config(BENCHMARKS.parent / "configs/gpu/drafts.yaml").prepare.policy, tmp_path, seed=0)
    return load_model(str(tmp_path))


def test_a_warning_wants_a_clear_loss():
    recorded = {"rollout/draft_pass_tokens": 2.5, "rollout/draft_break_even_tokens": 2.93}  # 1.07 times as fast
    assert draft_warnings(recorded) == []
    (warning,) = draft_warnings(recorded | {"rollout/draft_pass_tokens": 1.5})
    assert "gives 1.50 tokens, and it would take about 2.93" in warning
