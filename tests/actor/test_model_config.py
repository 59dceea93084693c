"""`config.json` alone describes a model; what would change the maths and is not built is refused by name."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_support import DENSE, EXPERTS, GDN_MOE, HYBRID, MOE, SHARED, TinyModel

from actor.hf.weight_table import export_plan
from rlpipe.config.actor import ActorConfig
from rlpipe.config.rollout import EngineConfig
from rlpipe.estimate.engine_pools import needed_pools
from rlpipe.estimate.memory import load_model
from rlpipe.estimate.parameters import model_parameters
from rlpipe.model import decoder_layout as layout
from rlpipe.model.actor_checks import check_actor
from rlpipe.model.families import FAMILIES, Family, Training
from rlpipe.model.model_reader import describe_model, trainable_model
from rlpipe.shared.errors import ModelError

PROJECT = Path(__file__).parents[2]


def config_of(model: TinyModel, architecture: str, **changes):
    return json.loads(model.config().to_json_string()) | {"architectures": [architecture]} | changes


def dense(**changes):
    return config_of(DENSE, "Qwen3ForCausalLM", **changes)


def moe(**changes):
    return config_of(MOE, "Qwen3MoeForCausalLM", **changes)


def hybrid(**changes):
    return config_of(GDN_MOE, "Qwen3_5MoeForCausalLM", **changes)


def test_a_hybrid_config_is_described_whole():
    model = trainable_model(hybrid())
    assert model.layer_kinds == ("linear_attention", "full_attention") * 2
    assert model.expert_layers == (True,) * 4
    assert model.rope.dimensions == 4
    assert model.attention_output_gate
    assert model.zero_centered_norm
    assert model.experts is not None
    assert (model.experts.experts, model.experts.top_k, model.experts.shared_width) == (4, 2, 32)
    assert model.normalize_top_k


def test_megatron_is_configured_as_the_actor_section_says():
    from actor.models.transformer_config import transformer_config

    parallel = {"tensor": 2, "sequence": True, "pipeline": 2, "virtual_pipeline": 2, "context": 2, "expert": 4}
    recompute = {"granularity": "selective", "modules": ["moe"]}
    settings = {"processes": 8, "dtype": "float32", "parallel": parallel, "recompute": recompute}
    config = transformer_config(trainable_model(moe()), ActorConfig.model_validate(settings))
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (2, True)
    assert (config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size) == (2, 2)
    assert (config.context_parallel_size, config.expert_model_parallel_size) == (2, 4)
    assert (config.params_dtype, config.bf16) == (torch.float32, False)
    assert (config.recompute_granularity, config.recompute_modules) == ("selective", ["moe"])
    half = ActorConfig(dtype="bfloat16", train_mtp=True, mtp_loss_weight=0.7, recompute={"granularity": "full"})
    config = transformer_config(trainable_model(hybrid(mtp_num_hidden_layers=1)), half)
    assert (config.params_dtype, config.bf16, config.recompute_granularity) == (torch.bfloat16, True, "full")
    assert (config.mtp_num_layers, config.mtp_loss_scaling_factor) == (1, 0.7)


def test_the_kernels_of_gated_delta_net_are_chosen_as_the_actor_section_says(monkeypatch):
    from actor.models import transformer_config

    chosen = lambda backend, sizes, dtype: SimpleNamespace(backend=(backend, dtype))  # noqa: E731
    monkeypatch.setattr(transformer_config, "choose_gdn_backend", chosen)
    actor = ActorConfig(gdn_backend="flashqla", dtype="bfloat16")
    config = transformer_config.transformer_config(trainable_model(hybrid()), actor)
    assert config.gdn_backend == ("flashqla", "bfloat16")


def test_defaults_come_from_transformers():
    raw = dense()
    for key in ("head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "tie_word_embeddings"):
        del raw[key]
    model = trainable_model(raw)
    assert (model.head_dim, model.norm_epsilon, model.max_positions, model.rope.theta) == (128, 1e-6, 32768, 1e4)
    assert not model.tied_embeddings


def test_a_size_is_in_the_file_or_it_is_refused():
    raw = dense()
    del raw["hidden_size"]
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        trainable_model(raw)
    raw = moe(num_attention_heads=8)
    del raw["num_key_value_heads"]
    with pytest.raises(ModelError, match="another default in transformers: kv_heads would be 8 here and 4"):
        trainable_model(raw)


def test_full_attention_interval_gives_the_layer_kinds():
    raw = hybrid(full_attention_interval=4, num_hidden_layers=8)
    del raw["layer_types"]
    assert trainable_model(raw).layer_kinds == (("linear_attention",) * 3 + ("full_attention",)) * 2


def test_experts_follow_mlp_only_layers_and_the_sparse_step():
    assert trainable_model(moe(mlp_only_layers=[0, 2])).expert_layers == (False, True, False, True)
    assert trainable_model(moe(decoder_sparse_step=2)).expert_layers == (False, True, False, True)


@pytest.mark.parametrize("folder", sorted((PROJECT / "configs/models").iterdir()), ids=lambda folder: folder.name)
def test_the_models_of_the_recipes_are_read(folder):
    raw = json.loads((folder / "config.json").read_text())
    model = trainable_model(folder)
    assert model.layers == raw.get("text_config", raw)["num_hidden_layers"]
    assert (model.experts is not None) == ("A3B" in folder.name)


def test_keys_with_empty_values_ask_for_nothing():
    assert trainable_model(hybrid(mlp_only_layers=[], some_plan=None)).expert_layers == (True,) * 4
    with pytest.raises(ModelError, match="mlp_only_layers"):
        trainable_model(hybrid(mlp_only_layers=[1]))


def test_the_text_part_of_a_vision_language_wrapper_is_read():
    text = hybrid()
    del text["architectures"]
    raw = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": {
            "hidden_size": 8,
            "intermediate_size": 16,
            "depth": 2,
            "patch_size": 4,
            "out_hidden_size": 64,
        },
        "image_token_id": 5,
    }
    model = trainable_model(raw)
    assert model.weight_prefix == "model.language_model."
    assert model.layers == 4
    with pytest.raises(ModelError, match="surprise"):
        trainable_model(raw | {"surprise": 1})
    with pytest.raises(ModelError, match="surprise"):
        trainable_model(raw | {"text_config": text | {"surprise": 1}})


@pytest.mark.parametrize(("top", "text", "tied"), [(None, True, False), (False, True, False), (True, False, True)])
def test_only_the_top_of_a_wrapper_says_whether_its_head_is_tied(top, text, tied):
    """As transformers and SGLang have it."""
    raw = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": hybrid(tie_word_embeddings=text)}
    del raw["text_config"]["architectures"]
    assert trainable_model(raw if top is None else raw | {"tie_word_embeddings": top}).tied_embeddings == tied


def test_reading_a_config_leaves_it_as_it_is():
    raw = dense(rope_parameters={"rope_theta": 1e4})
    before = json.dumps(raw)
    trainable_model(raw)
    assert json.dumps(raw) == before


def test_older_files_say_the_rotary_base_and_scaling_at_the_top():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    raw = config_of(TinyModel("l", "llama"), "LlamaForCausalLM", rope_theta=500000.0, rope_scaling=scaling)
    del raw["rope_parameters"]
    rope = trainable_model(raw).rope
    assert rope.theta == 500000.0
    assert rope.scaling is not None
    assert (rope.scaling.factor, rope.scaling.original_max_positions) == (8.0, 8192)
    older = hybrid(rope_theta=1e7, partial_rotary_factor=0.5)
    del older["rope_parameters"]
    assert (trainable_model(older).rope.theta, trainable_model(older).rope.dimensions) == (1e7, 8)


def test_multi_modal_rope_is_plain_rope_for_text():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    assert trainable_model(hybrid(rope_parameters=rope | sections)).rope == trainable_model(hybrid()).rope


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (partial(dense, architectures=["Gemma3ForCausalLM"]), "Gemma3ForCausalLM"),
        (partial(dense, model_type="mixtral", architectures=["MixtralForCausalLM"]), "'mixtral' can only be counted"),
        (partial(dense, model_type="qwen2"), "['Qwen3ForCausalLM'], which is no 'qwen2' (model_type)"),
        (partial(dense, model_type="gpt5"), "model type 'gpt5' is not supported: llama, qwen2"),
        (partial(dense, dtype=[]), "transformers refuses"),
        (partial(dense, tie_word_embeddings="yes"), "tie_word_embeddings"),
        (partial(dense, max_position_embeddings=0), "max_position_embeddings"),
        (partial(dense, architectures=[]), "architectures"),
        (partial(dense, new_trick=True), "new_trick"),
        (partial(dense, use_sliding_window=True, sliding_window=64, layer_types=None), "sliding"),
        (partial(dense, layer_types=["full_attention"] * 3 + ["sliding_attention"]), "sliding_attention"),
        (partial(dense, attention_bias=True), "attention_bias"),
        (partial(dense, hidden_act="gelu"), "hidden_act"),
        (partial(dense, attention_dropout=0.1), "attention_dropout"),
        (partial(dense, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "linear"),
        (partial(dense, num_key_value_heads=3), "num_key_value_heads"),
        (partial(moe, output_router_logits=True), "output_router_logits"),
        (partial(moe, num_experts_per_tok=9), "num_experts_per_tok"),
        (partial(hybrid, linear_num_value_heads=3), "linear_num_value_heads"),
        (partial(hybrid, attn_output_gate=False), "attn_output_gate"),
        (partial(hybrid, layer_types=["chunked_attention"] * 4), "chunked_attention"),
        (partial(hybrid, quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (partial(config_of, TinyModel("l", "llama"), "LlamaForCausalLM", mlp_bias=True), "mlp_bias"),
        (partial(dense, partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (
            partial(dense, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
            "= 0.25",
        ),
        (partial(moe, partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (
            partial(config_of, TinyModel("l", "llama"), "LlamaForCausalLM", partial_rotary_factor=0.5),
            "partial_rotary_factor",
        ),
        (partial(dense, layer_types=["full_attention"] * 3 + ["linear_attention"]), "linear_attention"),
        (
            partial(hybrid, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0}),
            "rotary",
        ),
        (partial(dense, architectures=5), "architectures"),
        (partial(dense, hidden_size=-48), "'hidden_size' is -48"),
        (partial(dense, rms_norm_eps=float("nan")), "rms_norm_eps"),
        (partial(dense, rope_parameters={"rope_type": "default", "rope_theta": 0}), "rope_theta"),
        (partial(moe, num_experts=5), "'num_experts' is 5: contradicts num_local_experts = 4"),
        (partial(moe, num_local_experts=None), "num_experts"),
        (partial(moe, decoder_sparse_step=0), "decoder_sparse_step"),
        (partial(moe, mlp_only_layers=[7]), "[7] are no layers of a model with 4"),
        (partial(hybrid, num_experts=0), "num_experts"),
        (partial(hybrid, shared_expert_intermediate_size=-1), "shared_expert_intermediate_size"),
        (partial(hybrid, mtp_num_hidden_layers="x"), "mtp_num_hidden_layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(raw, named):
    with pytest.raises(ModelError) as error:
        trainable_model(raw())
    assert named in str(error.value)


def test_one_row_adds_a_family(monkeypatch, tmp_path):
    """FLOPs, planned memory, an engine's pools and the actor's weights follow from the row alone."""
    raw = moe(model_type="invented", architectures=["InventedForCausalLM"])
    with pytest.raises(ModelError, match="'invented' is not supported"):
        describe_model(raw)
    keys = FAMILIES["qwen3_moe"].training.keys
    training = Training(("InventedForCausalLM",), keys, "qwen3_moe", qkv_bias=True, normalize_top_k=True)
    row = Family(layout.full_attention, partial(layout.experts_by_step, shared=False), training=training)
    monkeypatch.setitem(FAMILIES, "invented", row)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model, twin = trainable_model(tmp_path), trainable_model(moe())
    assert model.shape == replace(twin.shape, model_type="invented")
    assert describe_model(tmp_path).shape == model.shape
    assert load_model(str(tmp_path)).parameters == model_parameters(twin.shape, tied=False).total
    engine = EngineConfig(dtype="bfloat16")
    assert needed_pools(model.shape, engine, model.architecture, 2, 8).token_bytes > 0
    biases = [tensor.name for tensor in export_plan(model) if tensor.name.endswith("_proj.bias")]
    assert len(biases) == 3 * model.layers
    check_actor(model, ActorConfig())
    monkeypatch.setitem(FAMILIES, "invented", replace(row, training=None))
    assert describe_model(raw).shape == model.shape
    with pytest.raises(ModelError, match="'invented' can only be counted"):
        trainable_model(raw)


def test_a_missing_or_broken_file_is_one_sentence(tmp_path):
    with pytest.raises(ModelError, match="no model config at"):
        trainable_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        trainable_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="holds list"):
        trainable_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dense()))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ModelError, match="not a readable index"):
        trainable_model(tmp_path)


def test_reading_a_config_imports_no_megatron():
    code = "import sys, rlpipe.model.model_reader, actor.hf.weight_table; assert 'megatron' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_of_published_qwen_configs_are_known():
    """Keys of Qwen3-Next's and Qwen3.5's published files beyond transformers' own."""
    next_model = TinyModel("next", "qwen3_next", HYBRID | EXPERTS | SHARED)
    raw = config_of(next_model, "Qwen3NextForCausalLM", full_attention_interval=4, rope_scaling=None)
    assert trainable_model(raw).gated_delta_net is not None
    extra = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "attn_output_gate": True}
    assert trainable_model(hybrid(mamba_ssm_dtype="float32", **extra)).mtp_layers == 1
