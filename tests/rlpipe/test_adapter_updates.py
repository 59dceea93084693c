"""Which way adapters may go to the engines, said before anything starts."""

from types import SimpleNamespace

import pytest
import yaml

from rlpipe.config.load import load_config
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.errors import ConfigError
from rlpipe.training import adapter_updates
from rlpipe.training.adapter_updates import check_adapter_updates, with_measured_choice, with_saved_choice

DENSE, HYBRID = "configs/models/Qwen3-8B", "configs/models/Qwen3.5-9B"
DEMO = "configs/demo/arithmetic.yaml"


def config_of(*settings: str):
    return load_config(DEMO, ["prepare.policy=null", f"model.path={DENSE}", "weight_sync.adapters=alone", *settings])


def test_adapters_of_a_dense_model_can_go_alone():
    check_adapter_updates(config_of("actor.lora.rank=4"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([], "there are none"),
        (["actor.lora.rank=4", f"model.path={HYBRID}"], "engines do not serve adapters of Qwen3_5"),
        (["actor.lora={rank: 4, targets: [q_proj, lm_head]}"], "engines serve no adapters of lm_head of Qwen3"),
        (["actor.lora.rank=4", "ray.colocate=true", "ray.sleep=always"], "colocated engines give their weights back"),
        (
            ["actor.lora.rank=4", "rollout.engine.draft.method=ngram"],
            "engines in 8 bits, and engines that draft",
        ),
    ],
)
def test_what_cannot_go_alone_is_one_sentence(settings, reason):
    with pytest.raises(ConfigError, match=f"weight_sync.adapters is 'alone', but {reason}.*: set it to 'merged'"):
        check_adapter_updates(config_of(*settings))


def test_a_resumed_run_keeps_the_way_that_it_measured(tmp_path):
    settings = ["actor.lora.rank=4", "weight_sync.adapters=auto", f"run.directory={tmp_path}", "run.name=run"]
    config = config_of(*settings)
    assert with_saved_choice(config, resume=True) == config
    (tmp_path / "run").mkdir()
    tree = config.model_dump(mode="json") | {"weight_sync": {"adapters": "merged"}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(tree))
    assert with_saved_choice(config, resume=True).weight_sync.adapters == "merged"
    assert with_saved_choice(config, resume=False).weight_sync.adapters == "auto"


class _Engines:
    """Whose updates and responses take the seconds of the way in which adapters come; the first update of a way takes
    a minute."""

    can_send_adapters = True
    adapters_alone = False

    def __init__(self, seconds):
        self.seconds, self.now, self.pushed, self.usage_taken = seconds, 0.0, set(), 0

    def push(self, version):
        update, _ = self.seconds[self.adapters_alone]
        self.now += update if self.adapters_alone in self.pushed else 60.0
        self.pushed.add(self.adapters_alone)
        return {"weight_sync/bytes": 1.0}

    def client(self):
        return SimpleNamespace(generate=self._generate, close=lambda: None)

    async def _generate(self, request):
        self.now += self.seconds[self.adapters_alone][1] * request.sampling.max_new_tokens
        return SimpleNamespace(token_ids=(1,) * request.sampling.max_new_tokens)

    def take_usage(self):
        self.usage_taken += 1


@pytest.mark.parametrize(
    ("alone", "merged", "chosen"),
    [((1.0, 0.01), (5.0, 0.01), "alone"), ((5.0, 0.01), (1.0, 0.01), "merged"), ((1.0, 0.02), (5.0, 0.01), "merged")],
)
def test_the_way_whose_update_and_responses_take_less_is_chosen(tmp_path, monkeypatch, alone, merged, chosen):
    settings = ["actor.lora.rank=4", "weight_sync.adapters=auto", f"run.directory={tmp_path}", "run.name=run"]
    config, engines = config_of(*settings), _Engines({True: alone, False: merged})
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(adapter_updates, "time", SimpleNamespace(perf_counter=lambda: engines.now))
    found = with_measured_choice(config, engines, engines, 0, lambda note: None)
    assert found.weight_sync.adapters == chosen
    assert load_config(RunDirectory.of(config).config) == found
    assert engines.usage_taken == 1
