"""How long the driver waits for which call of the actor, with workers that are no processes."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from actor import group as actor_group
from actor.group import ActorGroup
from rlpipe.config.actor import OptimizerConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.load import validate

DEADLINES = {"start_seconds": 1, "train_seconds": 2, "weight_sync_seconds": 3, "checkpoint_seconds": 4}
CALLS = {
    "start": [
        lambda group: group.weight_plans(),
        lambda group: group.resident_bytes(),
        lambda group: group.warm_up((), (), AlgorithmConfig()),
    ],
    "train": [
        lambda group: group.set_reference(),
        lambda group: group.reset_optimizer(OptimizerConfig(), 1),
        lambda group: group.share_with_engines(1),
        lambda group: group.keep_resident("weights"),
        lambda group: group.take_usage(1),
    ],
    "weight_sync": [
        lambda group: group.listen_for_engines(),
        lambda group: group.begin_join_weight_groups(()).result(),
    ],
    "checkpoint": [
        lambda group: group.save_checkpoint(Path("x"), 1, {}),
        lambda group: group.finish_checkpoint(),
        lambda group: group.load_checkpoint(Path("x")),
        lambda group: group.save_hf(Path("x")),
    ],
}


@pytest.fixture
def waits(monkeypatch):
    """For how long was waited, and how often the processes are looked at meanwhile."""
    found = []

    def gathered(references, addresses, deadline_seconds, phase, watch):
        found.append((deadline_seconds, watch))
        return [("",)]

    monkeypatch.setattr(actor_group, "CallWatch", lambda addresses, phase, probe_seconds: probe_seconds)
    monkeypatch.setattr(actor_group, "gather", gathered)
    return found


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_may_take_as_long_as_its_kind_and_is_looked_at_as_often_as_is_said(waits, kind):
    config = validate(
        {
            "run": {"name": "r", "iterations": 1},
            "model": {"path": "none"},
            "data": {"train": [{"name": "t", "path": "t.jsonl"}]},
            "deadlines": DEADLINES,
            "fault": {"probe_seconds": 0.5},
        },
        "test",
    )
    group = ActorGroup(config, [SimpleNamespace(run=SimpleNamespace(remote=lambda *arguments: None))], [])
    for call in CALLS[kind]:
        waits.clear()
        with suppress(TypeError):  # what the processes would have answered is of another type
            call(group)
        assert waits == [(DEADLINES[f"{kind}_seconds"], 0.5)]
