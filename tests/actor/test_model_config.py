"""`config.json` alone describes a model; what would change the maths and is not built is refused by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from model_support import DENSE, EXPERTS, GDN_MOE, HYBRID, MOE, SHARED, TinyModel

from rlpipe.model.families import read_model
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
    model = read_model(hybrid())
    assert model.layer_kinds == ("linear_attention", "full_attention") * 2
    assert model.expert_layers == (True,) * 4
    assert model.rope.dimensions == 4
    assert model.attention_output_gate
    assert model.zero_centered_norm
    assert model.experts is not None
    assert (model.experts.experts, model.experts.top_k, model.experts.shared_width) == (4, 2, 32)
    assert model.experts.normalize_top_k


def test_defaults_come_from_transformers():
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2}
    model = read_model(raw)
    assert (model.hidden_size, model.head_dim, model.vocab_size) == (4096, 128, 151936)


def test_full_attention_interval_gives_the_layer_kinds():
    raw = hybrid(full_attention_interval=4, num_hidden_layers=8)
    del raw["layer_types"]
    assert read_model(raw).layer_kinds == (("linear_attention",) * 3 + ("full_attention",)) * 2


def test_experts_follow_mlp_only_layers_and_the_sparse_step():
    assert read_model(moe(mlp_only_layers=[0, 2])).expert_layers == (False, True, False, True)
    assert read_model(moe(decoder_sparse_step=2)).expert_layers == (False, True, False, True)


@pytest.mark.parametrize("folder", sorted((PROJECT / "configs/models").iterdir()), ids=lambda folder: folder.name)
def test_the_models_of_the_recipes_are_read(folder):
    raw = json.loads((folder / "config.json").read_text())
    model = read_model(folder)
    assert model.layers == raw.get("text_config", raw)["num_hidden_layers"]
    assert (model.experts is not None) == ("A3B" in folder.name)


def test_keys_with_empty_values_ask_for_nothing():
    assert read_model(hybrid(mlp_only_layers=[], some_plan=None)).expert_layers == (True,) * 4
    with pytest.raises(ModelError, match="mlp_only_layers"):
        read_model(hybrid(mlp_only_layers=[1]))


def test_the_text_part_of_a_vision_language_wrapper_is_read():
    text = hybrid()
    del text["architectures"]
    raw = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": {"depth": 2},
        "image_token_id": 5,
    }
    model = read_model(raw)
    assert model.weight_prefix == "model.language_model."
    assert model.layers == 4
    with pytest.raises(ModelError, match="surprise"):
        read_model(raw | {"surprise": 1})
    with pytest.raises(ModelError, match="surprise"):
        read_model(raw | {"text_config": text | {"surprise": 1}})


@pytest.mark.parametrize(("top", "text", "tied"), [(None, True, False), (False, True, False), (True, False, True)])
def test_only_the_top_of_a_wrapper_says_whether_its_head_is_tied(top, text, tied):
    """As transformers and SGLang have it."""
    raw = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": hybrid(tie_word_embeddings=text)}
    del raw["text_config"]["architectures"]
    assert read_model(raw if top is None else raw | {"tie_word_embeddings": top}).tied_embeddings == tied


def test_reading_a_config_leaves_it_as_it_is():
    raw = dense(rope_parameters={"rope_theta": 1e4})
    before = json.dumps(raw)
    assert json.dumps(read_model(raw).hf_config) == before


def test_older_files_say_the_rotary_base_and_scaling_at_the_top():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": scaling | {"original_max_position_embeddings": 8192},
    }
    rope = read_model(raw).rope
    assert rope.theta == 500000.0
    assert rope.scaling is not None
    assert (rope.scaling.factor, rope.scaling.original_max_positions) == (8.0, 8192)
    older = hybrid(rope_theta=1e7, partial_rotary_factor=0.5)
    del older["rope_parameters"]
    assert (read_model(older).rope.theta, read_model(older).rope.dimensions) == (1e7, 8)


def test_multi_modal_rope_is_plain_rope_for_text():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    assert read_model(hybrid(rope_parameters=rope | sections)).rope == read_model(hybrid()).rope


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (dense(architectures=["Gemma3ForCausalLM"]), "Gemma3ForCausalLM"),
        (dense(architectures=[]), "architectures"),
        (dense(new_trick=True), "new_trick"),
        (dense(use_sliding_window=True, sliding_window=64, layer_types=None), "sliding"),
        (dense(layer_types=["full_attention"] * 3 + ["sliding_attention"]), "sliding_attention"),
        (dense(attention_bias=True), "attention_bias"),
        (dense(hidden_act="gelu"), "hidden_act"),
        (dense(attention_dropout=0.1), "attention_dropout"),
        (dense(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "linear"),
        (dense(num_key_value_heads=3), "num_key_value_heads"),
        (moe(output_router_logits=True), "output_router_logits"),
        (moe(num_experts_per_tok=9), "num_experts_per_tok"),
        (hybrid(linear_num_value_heads=3), "linear_num_value_heads"),
        (hybrid(attn_output_gate=False), "attn_output_gate"),
        (hybrid(layer_types=["chunked_attention"] * 4), "chunked_attention"),
        (hybrid(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (config_of(TinyModel("l", "llama"), "LlamaForCausalLM", mlp_bias=True), "mlp_bias"),
        (dense(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (dense(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}), "= 0.25"),
        (moe(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (config_of(TinyModel("l", "llama"), "LlamaForCausalLM", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dense(layer_types=["full_attention"] * 3 + ["linear_attention"]), "linear_attention"),
        (hybrid(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0}), "rotary"),
        (dense(architectures=5), "architectures"),
        (dense(hidden_size=-48), "hidden_size = -48"),
        (dense(rms_norm_eps=float("nan")), "rms_norm_eps"),
        (dense(rope_parameters={"rope_type": "default", "rope_theta": 0}), "rope_theta"),
        (moe(num_experts=5), "num_experts = 5 and num_local_experts = 4"),
        (moe(num_local_experts=None), "num_experts"),
        (moe(decoder_sparse_step=0), "decoder_sparse_step"),
        (moe(mlp_only_layers=[7]), "mlp_only_layers [7]"),
        (hybrid(num_experts=0), "num_experts"),
        (hybrid(shared_expert_intermediate_size=-1), "shared_expert_intermediate_size"),
        (hybrid(mtp_num_hidden_layers="x"), "mtp_num_hidden_layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(raw, named):
    with pytest.raises(ModelError) as error:
        read_model(raw)
    assert named in str(error.value)


def test_a_missing_or_broken_file_is_one_sentence(tmp_path):
    with pytest.raises(ModelError, match="no model config at"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="holds list"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dense()))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ModelError, match="not a readable index"):
        read_model(tmp_path)


def test_reading_a_config_imports_no_megatron():
    code = "import sys, rlpipe.model.families, actor.hf.weight_table; assert 'megatron' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_of_published_qwen_configs_are_known():
    """Keys of Qwen3-Next's and Qwen3.5's published files beyond transformers' own."""
    next_model = TinyModel("next", "qwen3_next", HYBRID | EXPERTS | SHARED)
    raw = config_of(next_model, "Qwen3NextForCausalLM", full_attention_interval=4, rope_scaling=None)
    assert read_model(raw).gated_delta_net is not None
    extra = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "attn_output_gate": True}
    assert read_model(hybrid(mamba_ssm_dtype="float32", **extra)).mtp_layers == 1
