"""What a config.json says beyond the layers that the actor must compute: refused by name where it is not understood.

Every key of the raw file is either understood (`Training.keys` of its family), harmless (cannot change the forward pass
of the text model) or refused by name. Defaults come from the pinned transformers' own configuration class, so a key
that a checkpoint leaves out means what it means there.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

from rlpipe.model.description import Rope, RopeScaling
from rlpipe.shared.errors import ModelError

# Keys that cannot change log-probabilities or gradients of the text model.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chat_template",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "keys_to_ignore_at_inference",
        "label2id",
        "model_type",
        "name_or_path",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "router_aux_loss_coef",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "mamba_ssm_dtype",
        "rope_theta",
        "max_window_layers",
        "sliding_window",
        "sep_token_id",
        "decoder_start_token_id",
        "num_labels",
        "language_model_only",
        "mtp_use_dedicated_embeddings",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "audio_token_id",
        "vision_config",
        "full_attention_interval",
        "is_encoder_decoder",
        "tokenizer_file",
        "unk_token_id",
        "prefix",
        "use_bfloat16",
        "torchscript",
    }
)

# Keys of the two nested layers of a vision-language checkpoint around its text model.
WRAPPER_KEYS = frozenset({"text_config", "vision_config", "tie_word_embeddings"})


def refuse_unknown_keys(raw: Mapping[str, Any], understood: frozenset[str], architecture: str) -> None:
    """Raise ModelError naming every key that is neither understood nor harmless. Empty values ask for nothing."""
    unknown = sorted(
        key for key, value in raw.items() if key not in understood | HARMLESS and value not in (None, [], {})
    )
    if unknown:
        raise ModelError(
            f"config.json of {architecture} has keys that rlpipe does not know and must not ignore: "
            f"{', '.join(unknown)}: remove them if they change nothing, or use a supported model"
        )


def fill_defaults(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """All fields of transformers' configuration class for `model_type`, with `raw`'s values where it has them.

    Raises:
        ModelError: transformers refuses the values.
    """
    from transformers import CONFIG_MAPPING

    values = {key: value for key, value in raw.items() if key not in {"architectures", "model_type", "auto_map"}}
    values = copy.deepcopy(values)  # transformers completes some of them in place
    try:
        return dict(CONFIG_MAPPING[model_type](**values).to_dict())
    except Exception as error:  # transformers raises several unrelated types for wrong values
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"transformers refuses the {model_type} configuration: {first_line}") from error


def refuse_other_maths(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Refuse by name what would change the forward pass and is not built.

    config: with defaults filled in. text: as the file has it.
    """
    required = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "output_router_logits": False,
    }
    for key, value in required.items():
        if key in config and config[key] != value:
            raise ModelError(f"config.json has {key} = {config[key]!r}: only {value!r} is supported")
    if float(config.get("attention_dropout") or 0.0) > 0:
        raise ModelError(f"config.json has attention_dropout = {config['attention_dropout']}: only 0 is supported")
    if text.get("attn_output_gate", True) is not True:
        raise ModelError("config.json has attn_output_gate = false: these layers are only built with the gate")
    kinds = set(config.get("layer_types") or [])
    if unknown := kinds - {"full_attention", "linear_attention"}:
        raise ModelError(f"config.json has layer_types {sorted(unknown)}: only full and linear attention are supported")


def refuse_ignored_keys(config: Mapping[str, Any], text: Mapping[str, Any], architecture: str) -> None:
    """What transformers (and SGLang, mostly) would pass over."""
    for place in (text, config.get("rope_parameters") or {}):
        factor = place.get("partial_rotary_factor")
        if factor not in (None, 1):
            raise ModelError(
                f"config.json has partial_rotary_factor = {factor!r}, but {architecture} rotates all channels of a "
                "head whatever it says: remove it"
            )


def number(key: str, value: Any, most: float = math.inf) -> float:
    """`value`, if it is a number above 0 and up to `most`; ModelError otherwise."""
    if type(value) not in (int, float) or not 0 < value <= most or value == math.inf:
        raise ModelError(f"config.json has {key} = {value!r}: a number above 0 and up to {most} is needed")
    return float(value)


def read_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Rotary embedding; multi-modal sections (mrope) are the plain one for text, whose three positions are equal."""
    parameters = dict(config.get("rope_parameters") or {})
    kind = parameters.get("rope_type", "default")
    ignored = {"mrope_section", "mrope_interleaved", "type"}
    known = {"rope_type", "rope_theta", "partial_rotary_factor", *ignored}
    scaling = None
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        known |= set(names)
        scaling = RopeScaling(*(number(name, parameters[name]) for name in names))  # type: ignore[arg-type]
    elif kind not in ("default", "mrope"):
        raise ModelError(f"config.json has rope type {kind!r}: supported are default and llama3")
    if unknown := sorted(set(parameters) - known):
        raise ModelError(f"config.json has unknown rope_parameters: {', '.join(unknown)}")
    share = parameters.get("partial_rotary_factor")
    dimensions = head_dim if share is None else int(head_dim * number("partial_rotary_factor", share, 1.0))
    if dimensions % 2:
        raise ModelError(f"partial_rotary_factor rotates {dimensions} of {head_dim} channels: the number must be even")
    theta = number("rope_theta", parameters.get("rope_theta"))
    return Rope(theta=theta, dimensions=dimensions, scaling=scaling)
