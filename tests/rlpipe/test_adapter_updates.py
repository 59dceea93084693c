"""Which way adapters may go to the engines, said before anything starts."""

import pytest
import yaml

from rlpipe.config.load import load_config
from rlpipe.shared.errors import ConfigError
from rlpipe.training.adapter_updates import check_adapter_updates, with_saved_choice

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
