"""`rlpipe plan`: what it says of the recipes, and what it advises."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from actor import streamed_adam
from rlpipe.cli import app
from rlpipe.commands.clusters import load_cluster
from rlpipe.config.actor import ParallelConfig
from rlpipe.config.load import load_config
from rlpipe.estimate.memory import (
    FRAGMENTS_BYTES,
    SLOT_ELEMENTS,
    STATES_RESERVE_BYTES,
    UPDATE_SLOTS,
    Model,
    load_model,
    states_beside_engines_bytes,
    states_room_bytes,
)
from rlpipe.estimate.parameters import model_parameters
from rlpipe.estimate.run_estimate import plan, planned_lengths
from rlpipe.estimate.seconds import samples_of_a_prompt
from rlpipe.model.families import FAMILIES
from rlpipe.shared.project_files import CLUSTERS
from rlpipe.shared.project_files import ROOT as PROJECT
from rlpipe.training.trained_share import planned_model

RECIPES = sorted((PROJECT / "configs/recipes").glob("qwen*.yaml"))
SEED = PROJECT / "configs/recipes/qwen3_5_35b_a3b_dapo.yaml"
NARROW = ["rollout.engines=8", "rollout.engine.tensor_parallel=1"]
DENSE = PROJECT / "configs/recipes/qwen3_8b_dapo.yaml"
HALVES = [
    *("ray.colocate=false", "rollout.engine.tensor_parallel=1", "rollout.engine.memory_fraction=0.8"),
    *("actor.processes=4", "actor.parallel={tensor: 2, sequence: true, context: 2}"),
    *("actor.max_tokens_per_gpu=8448", "actor.recompute.granularity=full"),
]
HYBRID_ONE, DENSE_ONE = (PROJECT / f"configs/recipes/{name}_dapo.yaml" for name in ("qwen3_5_9b", "qwen3_0_6b"))
SHORT_ONE = PROJECT / "configs/recipes/qwen3_0_6b_gsm8k.yaml"
TOTAL = {"Qwen3-8B": 8.19e9, "Qwen3-30B-A3B": 30.5e9, "Qwen3.5-35B-A3B": 34.7e9}


def _run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("name", TOTAL)
def test_parameters_are_those_of_the_model(name):
    model = load_model(name)
    assert model.parameters == pytest.approx(TOTAL[name], rel=0.01)


def test_a_rank_holds_its_share():
    model = load_model("Qwen3.5-35B-A3B")
    whole = model_parameters(model.shape, model.tied)
    split = ParallelConfig(tensor=2, sequence=True, expert=8, context=4)
    assert whole.on_rank(split) == whole.tensor // 2 + whole.experts // 8 + whole.whole
    assert whole.on_rank(ParallelConfig()) == whole.total == model.parameters


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_fits_141_gigabytes(recipe):
    output = _run(str(recipe), "--cluster", "local_8x141gb")
    assert output.endswith("It fits.\n") and "warning" not in output
    assert len(recipe.read_text().splitlines()) <= 35


def test_the_recipe_with_narrow_engines_on_80_gigabytes_is_refused_with_a_setting_that_fits():
    output = _run(str(SEED), *NARROW, "--cluster", "local_8x80gb", code=1)
    assert "DOES NOT FIT  GPU while weights pass" in output
    settings = output.strip().splitlines()[-1].removeprefix("Nearest setting that fits: ").split()
    assert settings == WIDE
    assert _run(str(SEED), *settings, "--cluster", "local_8x80gb").endswith("It fits.\n")
    refused = json.loads(_run(str(SEED), *NARROW, "--cluster", "local_8x80gb", "--json", code=1))
    assert (refused["fits"], refused["nearest_setting"]) == (False, settings)
    assert [need["name"] for need in refused["memory"] if need["total_bytes"] > (need["limit_bytes"] or 1e20)]


@pytest.mark.parametrize("grace_seconds", [0, 60, 300])
def test_too_short_a_time_to_save_after_a_signal_is_told_with_one_that_suffices(grace_seconds):
    setting = f"fault.grace_seconds={grace_seconds}"
    answer = json.loads(_run(str(SEED), setting, "--cluster", "local_8x141gb", "--json"))
    assert answer["checkpoint_seconds"] == pytest.approx(answer["checkpoint_bytes"] / 5e9)  # that a node's disk takes
    if grace_seconds != 60:  # with 0 none is asked for
        assert answer["warnings"] == []
        return
    (warning,) = answer["warnings"]
    assert f"{answer['checkpoint_bytes'] / 1e9:,.1f} GB" in warning and "fault.grace_seconds is 60" in warning
    seconds = int(warning.split("raise it to ")[1].split()[0])
    longest = answer["checkpoint_seconds"] + answer["seconds"]["forward_backward"]
    assert longest < seconds < 2 * longest
    enough = f"fault.grace_seconds={seconds}"
    assert json.loads(_run(str(SEED), enough, "--cluster", "local_8x141gb", "--json"))["warnings"] == []


def test_each_node_writes_its_share_of_a_checkpoint():
    one, two = (
        json.loads(_run(str(SEED), f"actor.processes={8 * nodes}", "--cluster", cluster, "--json"))
        for nodes, cluster in ((1, "local_8x141gb"), (2, "ray_2x8x141gb"))
    )
    assert one["checkpoint_bytes"] == two["checkpoint_bytes"]
    assert one["checkpoint_seconds"] == pytest.approx(2 * two["checkpoint_seconds"])


def test_json_has_the_numbers_of_the_text():
    text = _run(str(SEED), "--cluster", "local_8x141gb")
    answer = json.loads(_run(str(SEED), "--cluster", "local_8x141gb", "--json"))
    assert answer["fits"] and answer["problems"] == [] and answer["nearest_setting"] is None
    assert f"{answer['step_seconds']:,.1f}" in text
    assert f"KV pool of {answer['engine']['kv_tokens']:,} tokens" in text
    for need in answer["memory"]:
        assert sum(need["bytes"].values()) == need["total_bytes"]
        assert f"{need['name']}: {need['total_bytes'] / 1e9:,.1f} GB" in text


def test_an_engine_without_room_for_a_request_is_told():
    config = load_config(SEED, [*NARROW, "rollout.engine.memory_fraction=0.3"])
    planned = plan(config, load_model(config.model.path), load_cluster("local_8x141gb"))
    assert planned.memory.engine.concurrency == 0
    assert any("no room for a single request" in problem for problem in planned.problems)


@pytest.mark.parametrize(
    ("overrides", "slots"),
    [
        ((), 1),
        (("rollout.engine.sglang.disable_radix_cache=false",), 5),
        (("rollout.generate.function=calculator",), 5),
        (("data.max_prompt_tokens=4096",), 5),
    ],
)
def test_recurrent_states_cap_the_requests(overrides, slots):
    config = load_config(SEED, overrides)
    planned = plan(config, load_model(config.model.path), load_cluster("local_8x141gb"))
    engine = planned.memory.engine
    assert engine.states is not None
    assert engine.states >= slots * engine.concurrency
    assert engine.concurrency == min(128, engine.states // slots, engine.kv_tokens // config.longest_sequence_tokens)


def test_engines_fill_their_share_only_where_their_pools_are_not_given():
    """Beside a pool that is given, however small, the actor has the rest of the GPU."""

    def held(*settings: str) -> int:
        config = load_config(PROJECT / "configs/recipes/qwen3_4b_dapo.yaml", settings)
        return plan(config, load_model("Qwen3-4B"), load_cluster("local_1x141gb")).held_beside_engines_bytes

    weights = 2 * 4.02e9
    assert held("rollout.engine.kv_cache_tokens=200000") > weights > held("rollout.engine.memory_fraction=0.9")


def _host_bytes(recipe: str, *settings: str) -> dict[str, int]:
    path = str(PROJECT / f"configs/recipes/{recipe}.yaml")
    needs = json.loads(_run(path, *settings, "--cluster", "local_1x141gb", "--json"))["memory"]
    return next(need["bytes"] for need in needs if need["name"] == "host memory of a node")


def test_frozen_weights_that_make_room_for_engines_lie_in_host_memory():
    leaving = "weights while engines work"
    weights, trained = 8.19e9 * 2, 87_293_952
    assert _host_bytes("qwen3_8b_lora")[leaving] == pytest.approx(weights + trained * 12, rel=0.01)
    assert leaving not in _host_bytes("qwen3_8b_lora", "rollout.engine.memory_fraction=0.5")
    assert leaving not in _host_bytes("qwen3_4b_dapo")  # its masters are there anyway


def test_a_reference_takes_its_own_place_in_host_memory_and_the_policy_s():
    parameters = model_parameters(load_model("Qwen3-0.6B").shape, tied=True).total
    assert "reference policy" not in _host_bytes("qwen3_0_6b_dapo")
    assert _host_bytes("qwen3_0_6b_dapo", "algorithm.kl.coefficient=0.001")["reference policy"] == 2 * 2 * parameters


def test_requests_begin_although_not_all_have_room_until_their_ends():
    one_gpu = str(PROJECT / "configs/recipes/qwen3_4b_dapo.yaml"), "--cluster", "local_1x141gb"
    has_room, together = json.loads(_run(*one_gpu, "--json"))["engine"]["concurrent_requests"], 128
    said = f"{together} requests begin together, {has_room} of 8,448 tokens have room"
    assert has_room < together and said in _run(*one_gpu)
    fewer = f"rollout.engine.max_running_requests={has_room}"
    assert "begin together" not in _run(*one_gpu, fewer)
    seconds, waiting = (json.loads(_run(*one_gpu, *more, "--json"))["seconds"]["rollout"] for more in ([], [fewer]))
    assert seconds < 0.8 * waiting


@pytest.mark.parametrize(
    ("more", "part", "grows"),
    [
        ("actor.recompute.granularity=full", "activations", False),
        ("actor.optimizer.cpu_offload_fraction=0.5", "optimizer", True),
        ("actor.logprob_chunk_tokens=8192", "logits chunk", True),
        ("weight_sync.bucket_bytes=104857600", "weight sync", False),
    ],
)
def test_a_setting_moves_its_part(more, part, grows):
    def size(*overrides: str) -> int:
        config = load_config(SEED, overrides)
        planned = plan(config, load_model(config.model.path), load_cluster("local_8x141gb"))
        return planned.memory.actor.get(part, 0)

    assert (size(more) > size()) is grows and size(more) != size()


def test_phases_are_those_that_the_run_needs():
    def phases(*overrides: str) -> set[str]:
        config = load_config(SEED, overrides)
        return set(plan(config, load_model(config.model.path), load_cluster("local_8x141gb")).seconds)

    assert phases() == {"rollout", "forward_backward", "optimizer", "sleep_wake", "weight_sync"}
    assert phases() - phases("ray.sleep=never") == {"sleep_wake"}
    assert phases("algorithm.kl.coefficient=0.01") - phases() == {"ref_logprob"}
    assert phases("algorithm.updates_per_iteration=2") - phases() == {"old_logprob"}
    assert phases("algorithm.correction.weight=token") == phases()
    ahead = ("ray.sleep=never", "rollout.mode=one_step_off", "rollout.oversampling=1", "rollout.partial=false")
    corrected = phases(*ahead, "algorithm.correction.weight=token")
    assert corrected - phases("ray.sleep=never") == {"old_logprob"}
    assert phases(*ahead, "algorithm.old_policy=rollout") == phases("ray.sleep=never")


@pytest.mark.parametrize(
    ("speed", "recipe", "phase", "part"),
    [
        ("products_share_of_peak", HYBRID_ONE, "forward_backward", 0.4),
        ("experts_share_of_peak", SEED, "forward_backward", 0.1),
        ("delta_rule_share_of_peak", SEED, "forward_backward", 0.05),
        ("attention_share_of_peak", DENSE_ONE, "forward_backward", 0.3),
        ("short_attention_share_of_peak", SHORT_ONE, "forward_backward", 0.15),
        ("head_share_of_peak", DENSE_ONE, "forward_backward", 0.1),
        ("decoding_share_of_bandwidth", SEED, "rollout", 0.3),
        ("attention_share_of_bandwidth", DENSE, "rollout", 0.3),
        ("gathering_share_of_link", SEED, "weight_sync", 0.3),
        ("weight_buffers_gigabytes_per_second", HYBRID_ONE, "weight_sync", 0.3),
    ],
)
def test_a_phase_takes_longer_where_its_part_is_slower(speed, recipe, phase, part):
    """part: of the phase, at least."""
    cluster, config = load_cluster("local_8x141gb"), load_config(recipe)
    speeds = cluster.speeds.model_copy(update={speed: getattr(cluster.speeds, speed) / 2})
    slower = cluster.model_copy(update={"speeds": speeds})
    model = load_model(config.model.path)
    before, after = (plan(config, model, one).seconds for one in (cluster, slower))
    assert after[phase] > (1 + part) * before[phase]
    assert {name: after[name] for name in after if name not in (phase, "rollout")} == {
        name: before[name] for name in before if name not in (phase, "rollout")
    }


def test_rollouts_take_longer_with_attention_kernels_that_read_more_slowly():
    cluster, model = load_cluster("local_8x141gb"), load_model("Qwen3-8B")

    def seconds(**named: str) -> float:
        config = load_config(DENSE, [*HALVES, f"rollout.engine.sglang={json.dumps(named)}"])
        return plan(config, model, cluster).seconds["rollout"]

    assert seconds(attention_backend="triton") > 1.15 * seconds()
    assert seconds(attention_backend="fa3", decode_attention_backend="triton") == seconds(attention_backend="triton")
    assert seconds(prefill_attention_backend="triton") == seconds(attention_backend="flashinfer") == seconds()


@pytest.mark.parametrize("model_type", sorted(name for name, family in FAMILIES.items() if not family.training))
def test_models_that_cannot_be_trained_are_planned(model_type, tmp_path):
    """docs/models.md says so."""
    missing = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}  # of transformers' defaults
    shape = AutoConfig.for_model(model_type).to_dict() | missing.get(model_type, {})
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = [f"model.path={tmp_path}", "actor.max_tokens_per_gpu=16384"]
    planned = plan(load_config(DENSE, settings), load_model(str(tmp_path)), load_cluster("local_8x141gb"))
    assert planned.seconds["forward_backward"] > 0 and planned.memory.actor["activations"] > 0


def test_no_pass_takes_less_than_the_host_needs_to_start_its_kernels():
    cluster, model = load_cluster("local_8x141gb"), load_model("Qwen3.5-35B-A3B")
    slow = cluster.model_copy(update={"speeds": cluster.speeds.model_copy(update={"host_layer_seconds": 1.0})})
    kept = ["algorithm.kl.coefficient=0.01", *WHOLE_LAYERS, *KEPT]
    for granularity, passes in (("none", 2), ("full", 3)):
        config = load_config(SEED, [*kept, f"actor.recompute.granularity={granularity}"])
        seconds, quick = (plan(config, model, one).seconds for one in (slow, cluster))
        assert seconds["forward_backward"] == pytest.approx(passes * 16 * 40)  # 16 packs of a rank, 40 layers
        assert seconds["ref_logprob"] - quick["ref_logprob"] == pytest.approx(16 * 40, rel=0.02)


def test_weights_that_engines_keep_in_8_bits_take_half_as_long_to_send():
    def seconds(*overrides: str) -> float:
        config = load_config(SEED, overrides)
        return plan(config, load_model(config.model.path), load_cluster("local_8x141gb")).seconds["weight_sync"]

    assert 0.5 < seconds("rollout.engine.quantization=fp8_all") / seconds() < 0.6
    assert seconds("rollout.engine.quantization=fp8_all") < seconds("rollout.engine.quantization=fp8") < seconds()


def test_a_prompt_is_computed_and_kept_once_for_its_group():
    """Without a cache of prefixes each of eight samples computes it, and fewer begin together."""
    recipe = ["configs/recipes/qwen3_8b_lora.yaml", "model.path=Qwen3-8B", "--cluster", "local_1x141gb"]
    long = ["eval.datasets=[]", "rollout.engine.max_running_requests=256", "data.max_prompt_tokens=16384"]
    alone = "rollout.engine.sglang.disable_radix_cache=true"
    assert " 256 requests begin together" in _run(*recipe, *long)
    engine = json.loads(_run(*recipe, *long, alone, "--json"))["engine"]
    assert f" {engine['kv_tokens'] // 16384} requests begin together" in _run(*recipe, *long, alone)

    def rollout(*settings: str) -> float:
        return json.loads(_run(*recipe, *long, "rollout.max_response_tokens=1", *settings, "--json"))["seconds"][
            "rollout"
        ]

    assert rollout(alone) == pytest.approx(8 * rollout(), rel=0.05)  # next to nothing but prompts
    short = "data.max_prompt_tokens=63"
    assert rollout(short, alone) == rollout(short)


@pytest.mark.parametrize(
    ("recipe", "model", "cluster", "sharing"),
    [
        ("qwen3_0_6b_gsm8k", "Qwen3-0.6B", "local_cpu", True),
        ("qwen3_5_9b_dapo", "Qwen3.5-9B", "local_cpu", False),  # recurrent states have no cache of prefixes there
        ("qwen3_5_9b_dapo", "Qwen3.5-9B", "local_1x141gb", True),  # prompts that are long beside responses
    ],
)
def test_prompts_are_shared_where_there_is_a_cache_of_prefixes(recipe, model, cluster, sharing):
    settings = [f"model.path={model}", "data.max_prompt_tokens=4096"]
    config = load_config(Path(f"configs/recipes/{recipe}.yaml"), settings)
    found = samples_of_a_prompt(config, planned_model(config), load_cluster(cluster), 4096)
    assert config.reuses_prefixes and found == (config.rollout.samples_per_prompt if sharing else 1)


def test_rollouts_take_longer_where_sglang_draws_the_tokens():
    """The difference is that of the passes over the logits of every token."""
    cluster = load_cluster("local_1x141gb")

    def seconds(*settings: str) -> float:
        changes = ["model.path=Qwen3-0.6B", "data.max_prompt_tokens=512", *settings]
        config = load_config(Path("configs/recipes/qwen3_0_6b_gsm8k.yaml"), changes)
        return plan(config, load_model(config.model.path), cluster).seconds["rollout"]

    deterministic = "rollout.engine.deterministic=true"
    speeds, vocabulary = cluster.speeds, 151_936
    passes = speeds.drawing_memory_passes - speeds.plain_drawing_memory_passes
    config = load_config(Path("configs/recipes/qwen3_0_6b_gsm8k.yaml"))
    tokens = planned_lengths(config).samples * planned_lengths(config).response_tokens
    more = passes * tokens * vocabulary * 4 / (cluster.node.gpu_memory_gigabytes_per_second * 1e9)
    assert seconds(deterministic) - seconds() == pytest.approx(more, rel=0.02)
    assert seconds("rollout.sampling.top_p=0.9") == seconds("rollout.sampling.top_k=50") == seconds(deterministic)


def test_a_decoding_step_takes_as_long_as_its_slower_side():
    cluster, config = load_cluster("local_8x141gb"), load_config(SEED)
    model = load_model(config.model.path)

    def rollout(**speeds: float) -> float:
        changed = cluster.model_copy(update={"speeds": cluster.speeds.model_copy(update=speeds)})
        return plan(config, model, changed).seconds["rollout"]

    usual = rollout()
    assert rollout(decoding_step_seconds=0.0, decoding_request_seconds=0.0) == usual
    by_host = rollout(decoding_step_seconds=1.0)
    assert by_host > config.rollout.max_response_tokens > usual
    assert rollout(decoding_step_seconds=1.0, decoding_share_of_bandwidth=0.45) == by_host


WIDE = ["rollout.engines=4", "rollout.engine.tensor_parallel=2"]
AUTO = ["actor.recompute.granularity=auto", "actor.max_tokens_per_gpu=auto"]


def _chosen(gigabytes: float) -> tuple[str, int]:
    cluster, config = load_cluster("local_8x141gb"), load_config(SEED, [*AUTO, *WIDE])
    node = cluster.node.model_copy(update={"gpu_memory_gigabytes": gigabytes})
    planned = plan(config, load_model(config.model.path), cluster.model_copy(update={"node": node}))
    actor = planned.config.actor
    as_settings = [
        f"actor.recompute.granularity={actor.recompute.granularity}",
        f"actor.max_tokens_per_gpu={actor.max_tokens_per_gpu}",
    ]
    given = plan(load_config(SEED, [*as_settings, *WIDE]), planned.model, planned.cluster)
    assert (given.memory, given.seconds, given.problems) == (planned.memory, planned.seconds, planned.problems)
    return actor.recompute.granularity, actor.pack_tokens


def test_more_memory_chooses_larger_packs_and_nothing_computed_again():
    choices = [_chosen(gigabytes) for gigabytes in (62.0, 75.0, 90.0, 150.1)]
    costs = [(granularity == "full", -tokens) for granularity, tokens in choices]
    assert costs == sorted(costs, reverse=True) and len(set(choices)) > 1
    assert choices[-1][0] == "none"
    assert all(4 * tokens % 8448 == 0 for _, tokens in choices)  # whole sequences, over 4 context ranks


def test_what_is_chosen_is_said():
    assert "chosen by memory: recompute none, packs of" in _run(str(SEED), *AUTO, "--cluster", "local_8x141gb")


def test_a_forced_length_is_the_length_that_is_planned():
    forced = ["rollout.sampling.ignore_eos=true", "--cluster", "local_8x141gb"]
    assert "and responses of 8,192 tokens" in _run(str(SEED), *forced)
    refused = CliRunner().invoke(app, ["plan", str(SEED), *forced, "--response-tokens", "100"])
    assert refused.exit_code == 2 and "lets every response meet its limit of 8192 tokens" in refused.output


def test_a_plan_takes_the_mean_lengths_that_are_given():
    recipe = ["configs/recipes/qwen3_4b_gsm8k.yaml", "model.path=Qwen3-4B", "--cluster", "local_1x141gb", "--json"]

    def planned(*options: str) -> dict[str, Any]:
        return json.loads(_run(*recipe, *options))

    longest, prompts, both = planned(), planned("--prompt-tokens", "100"), planned("--prompt-tokens", "100", *SHORT)
    assert [(one["prompt_tokens"], one["response_tokens"]) for one in (longest, prompts, both)] == [
        (512, 1024),
        (100, 1024),
        (100, 300),
    ]
    passes = [one["seconds"]["forward_backward"] for one in (longest, prompts, both)]
    assert passes[1] / passes[0] == pytest.approx(1124 / 1536, rel=0.05)
    assert passes[2] / passes[1] == pytest.approx(400 / 1124, rel=0.15)
    rollouts = [one["seconds"]["rollout"] for one in (longest, prompts, both)]
    assert rollouts[0] > rollouts[1] > 2 * rollouts[2]
    assert all(one["memory"] == longest["memory"] for one in (prompts, both))


SHORT = ("--response-tokens", "300")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt-tokens", "513"], "--prompt-tokens is 513, but a prompt has 512 tokens at most"),
        (["--response-tokens", "1025"], "--response-tokens is 1025, but a response has 1024 tokens at most"),
    ],
)
def test_a_mean_beyond_its_limit_is_refused(options, said):
    recipe = ["configs/recipes/qwen3_4b_gsm8k.yaml", "model.path=Qwen3-4B", "--cluster", "local_1x141gb"]
    refused = CliRunner().invoke(app, ["plan", *recipe, *options])
    assert refused.exit_code == 2 and said in refused.output


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("actor.parallel.tensor=3 actor.processes=3", "num_attention_heads = 32 .* actor.parallel.tensor = 3"),
        ("actor.parallel.pipeline=5 actor.processes=5", "num_hidden_layers = 36 .* = 5"),
        ("rollout.engine.tensor_parallel=3 actor.processes=3", "num_attention_heads = 32 .*engine.tensor_parallel = 3"),
        ("rollout.engine.draft.method=mtp", "method is 'mtp', but SGLang cannot draft with"),
        ("rollout.max_response_tokens=60000", "sequences of up to 60256 tokens .* max_position_embeddings = 40960"),
        ("rollout.engine.context_tokens=8000", "is 8448 tokens, .* rollout.engine.context_tokens is 8000"),
    ],
)
def test_what_training_would_refuse_of_the_model_does_not_fit_either(settings, said):
    recipe = PROJECT / "configs/recipes/qwen3_4b_dapo.yaml"
    output = _run(str(recipe), "--cluster", "local_8x141gb", *settings.split(), code=2)
    assert re.search(said, output), output


@pytest.mark.parametrize(("layers", "code"), [(1, 0), (None, 0), (0, 2)])
def test_a_prediction_layer_is_missed_only_where_the_configuration_has_none(tmp_path, layers, code):
    """One that is silent leaves it to the weights, which a plan does not read."""
    config = json.loads((PROJECT / "configs/models/Qwen3.5-9B/config.json").read_text())
    assert not any("mtp" in name for name in [*config, *config["text_config"]])
    if layers is not None:
        config["text_config"]["mtp_num_hidden_layers"] = layers
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = [f"model.path={tmp_path}", "rollout.engine.draft.method=mtp", "actor.train_mtp=true"]
    output = _run(str(HYBRID_ONE), "--cluster", "local_8x141gb", *settings, code=code)
    assert ("0 multi-token-prediction layers" in output) == (code == 2)


def test_examples_have_no_prompts_of_their_own():
    recipe = ["configs/recipes/qwen3_4b_gsm8k_sft.yaml", "model.path=Qwen3-4B", "--cluster", "local_1x141gb"]
    refused = CliRunner().invoke(app, ["plan", *recipe, "--prompt-tokens", "100"])
    assert refused.exit_code == 2 and "--prompt-tokens is for runs that generate" in refused.output
    assert "with examples of 300 tokens" in _run(*recipe, *SHORT)


def test_eight_billion_parameters_do_not_fit_a_laptop():
    output = _run("configs/demo/arithmetic.yaml", "model.path=Qwen3-8B", "--cluster", "local_cpu", code=1)
    assert "DOES NOT FIT  host memory" in output


KEPT = ["actor.recompute.granularity=full", "actor.max_tokens_per_gpu=8448"]
WHOLE_LAYERS = [f"actor.parallel.{key}" for key in ("tensor=1", "sequence=false", "context=1", "expert=1")]
MOE = PROJECT / "configs/recipes/qwen3_30b_a3b_dapo.yaml"


def _answer(recipe: Path, cluster: str, *settings: str, code: int = 0) -> dict[str, Any]:
    return json.loads(_run(str(recipe), *settings, "--cluster", cluster, "--json", code=code))


@pytest.mark.parametrize(
    ("recipe", "cluster", "settings"), [(MOE, "local_8x141gb", NARROW), (DENSE, "ray_2x8x141gb", [])]
)
def test_a_faster_layout_is_told_fits_and_is_as_fast_as_told(recipe, cluster, settings):
    present = _answer(recipe, cluster, *settings)
    faster = present["faster_layout"]
    assert faster["step_seconds"] < 0.9 * present["step_seconds"]
    planned = _answer(recipe, cluster, *faster["settings"])
    assert planned["fits"] and planned["step_seconds"] == pytest.approx(faster["step_seconds"])
    assert planned["faster_layout"] is None
    assert "Faster by these figures" in _run(str(recipe), *settings, "--cluster", cluster)


def test_wider_engines_of_a_model_that_leaves_no_room_are_faster():
    present, wide = _answer(MOE, "local_8x80gb", *NARROW, code=1), _answer(MOE, "local_8x80gb", *WIDE)
    assert wide["engine"]["concurrent_requests"] > 4 * present["engine"]["concurrent_requests"]
    assert present["nearest_setting"] == WIDE and wide["seconds"]["rollout"] < present["seconds"]["rollout"]


def test_idle_gpus_are_told():
    assert _answer(DENSE, "ray_2x8x141gb")["idle_gpus"] == 8
    assert "8 of 16 GPUs idle: the run uses 8." in _run(str(DENSE), "--cluster", "ray_2x8x141gb")
    assert _answer(DENSE, "local_8x80gb")["idle_gpus"] == 0


def test_where_nothing_can_be_generated_no_seconds_are_given():
    settings = [*NARROW, "rollout.engine.memory_fraction=0.3"]
    refused = _answer(MOE, "local_8x80gb", *settings, code=1)
    assert refused["step_seconds"] is None and "rollout" not in refused["seconds"] and refused["faster_layout"] is None
    text = _run(str(MOE), *settings, "--cluster", "local_8x80gb", code=1)
    assert "no engine has room for a request" in text and "  step " not in text


def test_generation_beside_training_takes_the_longer_of_the_two():
    ahead = [*HALVES, "rollout.mode=one_step_off", "algorithm.old_policy=rollout"]
    shorter = "rollout.max_response_tokens=2048"
    for settings, is_rollout in ((ahead, True), ([*ahead, shorter], False)):
        beside = _answer(DENSE, "local_8x80gb", *settings)
        rollout = beside["seconds"].pop("rollout")
        others = sum(beside["seconds"].values())
        assert beside["step_seconds"] == pytest.approx(rollout if is_rollout else others)
        assert (rollout > others) == is_rollout


def test_stages_of_a_pipeline_wait_for_each_other():
    def passes(*settings: str) -> float:
        return _answer(DENSE, "local_8x80gb", *WHOLE_LAYERS, *settings)["seconds"]["forward_backward"]

    assert passes("actor.parallel.pipeline=2") > passes()


def test_the_last_stage_of_a_pipeline_has_the_head_beside_its_layers():
    cluster, model = load_cluster("local_8x141gb"), load_model("Qwen3.5-35B-A3B")
    without_head = replace(model, shape=replace(model.shape, vocab_size=8))

    def stages_over_whole(model: Model) -> float:
        alone, four = (
            plan(load_config(SEED, [*WHOLE_LAYERS, *KEPT, f"actor.parallel.pipeline={stages}"]), model, cluster)
            for stages in (1, 4)
        )
        return four.seconds["forward_backward"] / alone.seconds["forward_backward"]

    assert 1.25 < stages_over_whole(model) / stages_over_whole(without_head) < 1.4


def test_settings_of_the_cluster_are_planned(tmp_path):
    cluster = tmp_path / "mine.yaml"
    cluster.write_text(f"base: {CLUSTERS}/local_8x80gb.yaml\nsettings: {{rollout: {{engines: 2}}}}\n")
    assert _answer(DENSE, str(cluster), *HALVES)["idle_gpus"] == 2


def test_adapters_take_memory_passes_beside_the_layers():
    settings = ["actor.lora.rank=16", "actor.recompute.granularity=full", "actor.max_tokens_per_gpu=20480"]
    config = load_config(PROJECT / "configs/recipes/qwen3_8b_lora.yaml", settings)
    cluster, model = load_cluster("local_1x141gb"), planned_model(config)

    def seconds(passes):
        speeds = cluster.speeds.model_copy(update={"adapter_memory_passes": passes})
        return plan(config, model, cluster.model_copy(update={"speeds": speeds})).seconds["forward_backward"]

    query, key, feed_forward = 4096 + 4096, 4096 + 1024, 4096 + 12288  # inputs and outputs of a projection
    ends = 36 * (2 * query + 2 * key + 3 * feed_forward)
    tokens = config.rollout.prompts_per_iteration * config.rollout.samples_per_prompt * config.longest_sequence_tokens
    read = 4 * ends * tokens * 2 / (cluster.node.gpu_memory_gigabytes_per_second * 1e9)
    assert seconds(4) - seconds(0) == pytest.approx(read)


def test_a_supervised_run_has_no_engines():
    supervised = ["sft={max_sequence_tokens: 2048, sequences_per_step: 64}", "actor.max_tokens_per_gpu=auto"]
    planned = _answer(DENSE, "local_8x80gb", *HALVES, *supervised)
    assert set(planned["seconds"]) == {"forward_backward", "optimizer"}
    assert planned["gpus_needed"] == 4 and planned["idle_gpus"] == 4
    assert [need["name"] for need in planned["memory"]] == ["actor GPU", "host memory of a node", "disk"]


def test_optimizer_states_stay_on_a_gpu_as_far_as_there_is_room():
    def planned(cluster, *settings):
        config = load_config(PROJECT / "configs/recipes/qwen3_0_6b_gsm8k.yaml", settings)
        return plan(config, load_model(config.model.path), load_cluster(cluster))

    roomy = planned("local_1x141gb")
    slots = math.ceil(roomy.model.parameters / SLOT_ELEMENTS) + 1  # one for what has no weight decay
    assert roomy.kept_state_bytes == 12 * slots * SLOT_ELEMENTS
    tight = planned("local_1x24gb", "actor.recompute.granularity=none", "actor.max_tokens_per_gpu=4096")
    assert 0 <= tight.kept_state_bytes < roomy.kept_state_bytes
    beside = sum(tight.memory.actor.values()) + tight.kept_state_bytes + STATES_RESERVE_BYTES
    assert tight.kept_state_bytes == 0 or beside <= tight.cluster.node.gpu_memory_gigabytes * 1e9
    assert planned("local_1x141gb", "actor.optimizer.device_cache_gigabytes=1").kept_state_bytes == 12 * SLOT_ELEMENTS
    assert planned("local_1x141gb", "actor.optimizer.cpu_offload_fraction=0").kept_state_bytes == 0
    assert planned("local_cpu").kept_state_bytes == 0


@pytest.mark.parametrize(
    ("room", "states", "beside_gradients"),
    [(40, 20, True), (40, 19, True), (40, 25, True), (40, 26, False), (20, 0, True), (19, 0, False), (19, 4, False)],
)
def test_gradients_stay_mapped_where_states_of_a_quarter_of_their_bytes_have_to_go(room, states, beside_gradients):
    gradients = 20
    found = states_room_bytes(room * 1e9 + FRAGMENTS_BYTES, gradients * 1e9, states * 1e9)
    assert found == ((room - gradients) * 1e9 if beside_gradients else room * 1e9 + FRAGMENTS_BYTES)


@pytest.mark.parametrize(
    ("recipe", "setting", "those_of_passes_stay", "gradients_too"),
    [
        ("qwen3_5_9b_dapo", "sft={max_sequence_tokens: 2048, sequences_per_step: 64}", True, False),
        ("qwen3_4b_gsm8k", "rollout.engine.max_running_requests=176", False, True),
        ("qwen3_4b_gsm8k", "rollout.engine.max_running_requests=320", False, False),
    ],
    ids=["no engines", "engines that leave nearly enough", "engines that leave less"],
)
def test_states_are_moved_unless_they_stay_beside_passes_and_engines(
    recipe, setting, those_of_passes_stay, gradients_too
):
    def planned(*more):
        config = load_config(PROJECT / f"configs/recipes/{recipe}.yaml", [setting, *more])
        return plan(config, load_model(config.model.path), load_cluster("local_1x141gb"))

    some, none = planned(), planned("actor.optimizer.device_cache_gigabytes=0")
    stays = states_beside_engines_bytes(some.config, some.model, some.cluster, some.memory)
    link = some.cluster.speeds.lone_streaming_share_of_host_link * some.cluster.network.host_to_gpu_gigabytes_per_second
    saved = none.seconds["optimizer"] - some.seconds["optimizer"]
    assert saved == pytest.approx(stays / (link * 1e9))
    assert 0 < stays <= some.kept_state_bytes
    assert (stays == some.kept_state_bytes) == those_of_passes_stay
    if not those_of_passes_stay:
        gradients = some.memory.actor["gradients"] if gradients_too else 0
        assert some.held_beside_engines_bytes == some.memory.actor["parameters"] + stays + gradients


def test_an_update_whose_states_take_more_than_its_passes_is_counted():
    def actor_parts(*settings):
        config = load_config(PROJECT / "configs/recipes/qwen3_0_6b_gsm8k.yaml", settings)
        return plan(config, load_model(config.model.path), load_cluster("local_1x141gb")).memory.actor

    assert "update beyond passes" not in actor_parts()
    tiny = ("actor.max_tokens_per_gpu=1024", "rollout.max_response_tokens=512", "actor.logprob_chunk_tokens=64")
    parts = actor_parts(*tiny, "actor.recompute.granularity=full")
    passes = sum(parts.get(name, 0) for name in ("activations", "logits chunk", "recomputed layer"))
    staged = UPDATE_SLOTS * SLOT_ELEMENTS * 12 + SLOT_ELEMENTS * 4
    assert passes + parts["update beyond passes"] == staged
    assert "update beyond passes" not in actor_parts(*tiny, "actor.optimizer.cpu_offload_fraction=0")
    assert (UPDATE_SLOTS, SLOT_ELEMENTS) == (streamed_adam.LEAST_SLOTS, streamed_adam.CHUNK_ELEMENTS)


def test_a_disk_holds_the_new_checkpoint_beside_those_that_are_kept_and_all_policies():
    kept = ["checkpoint.interval_iterations=5", "checkpoint.keep=2", "checkpoint.save_hf=every", "run.iterations=10"]
    answer = _answer(DENSE, "local_8x141gb", *kept)
    disk = next(need["bytes"] for need in answer["memory"] if need["name"] == "disk")
    assert disk["checkpoints"] == 3 * answer["checkpoint_bytes"]
    assert disk["exported policies"] == 3 * 2 * load_model("Qwen3-8B").parameters


def test_a_first_stage_has_the_embedding_and_activations_of_a_pack_for_each_stage():
    def actor(stages):
        config = load_config(SEED, [*WHOLE_LAYERS, *KEPT, f"actor.parallel.pipeline={stages}"])
        return plan(config, load_model(config.model.path), load_cluster("local_8x141gb")).memory.actor

    one, four, embedding = actor(1), actor(4), 2 * 248_320 * 2048
    assert four["activations"] == one["activations"]
    assert four["parameters"] == pytest.approx((one["parameters"] - 2 * embedding) / 4 + embedding, rel=0.02)


def test_engines_share_the_prompts():
    def rollout(engines):
        settings = ["rollout.max_response_tokens=1", "data.max_prompt_tokens=4096", f"rollout.engines={engines}"]
        return _answer(DENSE, "local_8x141gb", *settings, "rollout.engine.tensor_parallel=1")["seconds"]["rollout"]

    assert rollout(4) == pytest.approx(2 * rollout(8), rel=0.1)
