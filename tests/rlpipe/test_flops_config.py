"""Reading HF configs: defaults of the model types, patterns of layers, and refusals by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from rlpipe.flops import model_flops
from rlpipe.flops.layers import GatedDeltaNet, MixtureOfExperts
from rlpipe.model.families import FAMILIES
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.errors import ModelError

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
}
SPARSE = DENSE | {"model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
HYBRID = SPARSE | {
    "model_type": "qwen3_5_moe",
    "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def _kinds(config):
    """One letter a layer: f, s (window) or g for the mixer, then d or m for the feed-forward part."""
    layers = describe_model(config).shape.layers
    mixers = ["g" if isinstance(layer.mixer, GatedDeltaNet) else "s" if layer.mixer.window else "f" for layer in layers]
    return " ".join(
        mixer + ("m" if isinstance(layer.feed_forward, MixtureOfExperts) else "d")
        for mixer, layer in zip(mixers, layers, strict=True)
    )


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (DENSE, "fd fd fd fd"),
        (DENSE | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, "fd fd fd fd"),
        (DENSE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, "fd fd fd sd"),
        (
            DENSE | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "sd fd sd fd",
        ),
        (DENSE | {"model_type": "mistral"}, "sd sd sd sd"),
        (DENSE | {"model_type": "mistral", "sliding_window": None}, "fd fd fd fd"),
        (SPARSE, "fm fm fm fm"),
        (SPARSE | {"decoder_sparse_step": 2}, "fd fm fd fm"),
        (SPARSE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, "fd fm fd fd"),
        (SPARSE | {"num_experts": 0}, "fd fd fd fd"),
        (SPARSE | {"use_sliding_window": True, "sliding_window": 8}, "sm sm sm sm"),
        (HYBRID, "gm gm gm fm"),
        (HYBRID | {"full_attention_interval": 2}, "gm fm gm fm"),
        (HYBRID | {"layer_types": ["full_attention", *["linear_attention"] * 3]}, "fm gm gm gm"),
        (HYBRID | {"model_type": "qwen3_next", "mlp_only_layers": [0]}, "gd gm gm fm"),
    ],
)
def test_kinds_of_layers(config, kinds):
    assert _kinds(config) == kinds


def test_width_of_a_head():
    def head_dim(**changes):
        config = {key: value for key, value in (DENSE | changes).items() if value != "absent"}
        return describe_model(config).shape.layers[0].mixer.head_dim

    assert head_dim() == 12
    assert head_dim(head_dim="absent") == 128  # transformers' default of qwen3
    assert head_dim(head_dim=None) == 8
    assert head_dim(head_dim="absent", model_type="llama") == 8
    with pytest.raises(ModelError, match="hidden_size 32 is no multiple of num_attention_heads 6"):
        head_dim(head_dim=None, num_attention_heads=6)


def test_output_gate_belongs_to_the_hybrid_types():
    plain = describe_model(HYBRID | {"attn_output_gate": False}).shape.layers[3].mixer
    gated = describe_model(HYBRID).shape.layers[3].mixer
    assert gated.weights_flops - plain.weights_flops == 2 * 32 * 4 * 12


def test_no_shared_expert_no_gate():
    with_shared = describe_model(HYBRID).shape.layers[0].feed_forward
    without = describe_model(HYBRID | {"shared_expert_intermediate_size": 0}).shape.layers[0].feed_forward
    assert with_shared.weights_flops - without.weights_flops == 6 * 32 * 20 + 2 * 32
    assert without.weights_flops == 2 * 6 * 32 * 24 + 2 * 32 * 6


def test_both_names_of_the_number_of_experts():
    renamed = {key: value for key, value in SPARSE.items() if key != "num_experts"} | {"num_local_experts": 6}
    assert describe_model(renamed).shape == describe_model(SPARSE).shape
    with pytest.raises(ModelError, match="contradicts num_local_experts = 7"):
        describe_model(SPARSE | {"num_local_experts": 7})


def test_tied_embeddings_change_nothing():
    assert describe_model(DENSE | {"tie_word_embeddings": True}).shape == describe_model(DENSE).shape


def test_a_nested_decoder_equals_a_flat_one():
    nested = {"model_type": "qwen3_5_moe", "text_config": HYBRID | {"model_type": "qwen3_5_moe_text"}}
    lengths = [5, 9]
    assert model_flops(describe_model(nested).shape, lengths) == model_flops(describe_model(HYBRID).shape, lengths)
    without_inner_type = {key: value for key, value in HYBRID.items() if key != "model_type"}
    nested = {"model_type": "qwen3_5_moe", "text_config": without_inner_type}
    assert describe_model(nested) == describe_model(HYBRID)


@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "num_nextn_predict_layers", "mtp_num_layers"])
def test_names_of_multi_token_prediction(key):
    assert describe_model(SPARSE | {key: 2}).shape.mtp_layers == 2


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (DENSE | {"model_type": "mamba2"}, "mamba2"),
        (DENSE | {"hidden_size": None}, "hidden_size"),
        (DENSE | {"hidden_size": "32"}, "hidden_size"),
        (DENSE | {"num_hidden_layers": True}, "num_hidden_layers"),
        (DENSE | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (DENSE | {"num_experts": 8}, "num_experts = 8"),
        (DENSE | {"kv_lora_rank": 4}, "kv_lora_rank = 4"),
        (DENSE | {"use_mla": True}, "use_mla = True"),
        (DENSE | {"intermediate_size": [48, 64, 48, 64]}, "intermediate_size"),
        (DENSE | {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (DENSE | {"attn_output_gate": True}, "attn_output_gate = True"),
        (DENSE | {"linear_attn_config": {"heads": 2}}, "linear_attn_config"),
        (DENSE | {"audio_config": {"layers": 2}}, "audio_config"),
        (DENSE | {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2"),
        (DENSE | {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (DENSE | {"layer_types": ["full_attention"] * 3}, "3 entries for 4 layers"),
        (DENSE | {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        (DENSE | {"model_type": "llama", "layer_types": ["sliding_attention"] * 4}, "every layer full_attention"),
        (SPARSE | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (SPARSE | {"mlp_only_layers": [4]}, "mlp_only_layers"),
        (SPARSE | {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        (SPARSE | {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8"),
        (SPARSE | {"first_k_dense_replace": 1}, "first_k_dense_replace = 1"),
        (SPARSE | {"mtp_num_layers": 1, "num_nextn_predict_layers": 2}, "MTP"),
        (HYBRID | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (HYBRID | {"model_type": "qwen3_5"}, "moe_intermediate_size = 24"),
        (HYBRID | {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        (HYBRID | {"vision_config": {"depth": 2}}, "vision_config"),
        (HYBRID | {"text_config": 3}, "text_config"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, named):
    with pytest.raises(ModelError, match=named):
        describe_model(config)


def test_a_switched_off_stranger_is_no_stranger():
    config = DENSE | {"num_experts": 0, "kv_lora_rank": None, "mlp_only_layers": [], "attn_output_gate": False}
    assert describe_model(config).shape == describe_model(DENSE).shape


def test_settings_of_generation_and_training_are_no_strangers():
    settings = {"top_k": 50, "num_beams": 1, "attention_dropout": 0.1, "router_aux_loss_coef": 0.1, "head_dtype": "x"}
    assert describe_model(DENSE | settings).shape == describe_model(DENSE).shape


def test_every_known_type_reads_what_transformers_writes():
    written = {model_type: AutoConfig.for_model(model_type).to_dict() for model_type in FAMILIES}
    written["glm4_moe"]["head_dim"] = 128
    written["deepseek_v2"]["num_experts_per_tok"] = 6
    for config in written.values():
        assert model_flops(describe_model(config).shape, [128]).forward > 0


def test_where_a_model_is_looked_up(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert describe_model(tmp_path) == describe_model(tmp_path / "config.json") == describe_model(DENSE)
    with pytest.raises(ModelError, match=r"no model config at 'Qwen9'.*Qwen3-8B"):
        describe_model("Qwen9")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        describe_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not valid JSON"):
        describe_model(tmp_path)


def test_no_heavy_import():
    code = "import sys, rlpipe.commands.flops, rlpipe.flops.peaks\n"
    code += "print(*(m for m in ('torch', 'numpy') if m in sys.modules))"
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert run.stdout.strip() == ""
