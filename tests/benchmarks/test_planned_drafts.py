"""What drafts must bring by the model of `rlpipe plan`, beside the recorded run that its speeds are fitted to."""

import json
import re
from pathlib import Path

import pytest

from rlpipe.commands.cards.record_file import read_record
from rlpipe.commands.clusters import load_cluster
from rlpipe.config.draft import DraftConfig
from rlpipe.estimate.decoding import EnginePass, break_even_tokens
from rlpipe.estimate.memory import load_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROW = re.compile(r"^ +(?P<requests>\d+)  mtp +[\d,]+ +(?P<ratio>[\d.]+) +(?P<tokens>[\d.]+)$", re.MULTILINE)
STEPS = 3


def test_the_model_still_gives_the_recorded_break_even_within_a_fifth(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from layer_shapes import hybrid_config

    recorded = read_record(BENCHMARKS / "results/rollout_drafts.cuda.json")
    words = recorded.command.split()
    layers, tokens = (int(words[words.index(name) + 1]) for name in ("--hybrid-layers", "--tokens"))
    (tmp_path / "config.json").write_text(json.dumps(hybrid_config(layers, 32768, tiny=False)))
    model, cluster = load_model(str(tmp_path)), load_cluster("local_1x141gb")
    found = {int(row["requests"]): float(row["tokens"]) / float(row["ratio"]) for row in ROW.finditer(recorded.output)}
    assert len(found) >= 3
    for requests, measured in found.items():
        work = EnginePass(requests, tokens / 2)  # prompts are short
        planned = break_even_tokens(model, cluster, 1, DraftConfig(method="mtp", steps=STEPS), work)
        print(f"{requests} requests: {planned:.2f} tokens planned, {measured:.2f} measured")
        assert planned == pytest.approx(measured, rel=0.2)
