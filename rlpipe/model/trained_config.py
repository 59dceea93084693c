"""Read a Hugging Face `config.json`: refuse what is not understood, fill in defaults, pass on the text model's part.

Every key of the raw file is either understood (read below or in `families`), harmless (cannot change the forward pass
of the text model) or refused by name. Defaults come from the pinned transformers' own configuration class, so a key
that a checkpoint leaves out means what it means there.
"""

import copy
import json
from pathlib import Path
from typing import Any

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


def refuse_unknown_keys(raw: dict[str, Any], understood: frozenset[str], architecture: str) -> None:
    """Raise ModelError naming every key that is neither understood nor harmless. Empty values ask for nothing."""
    unknown = sorted(
        key for key, value in raw.items() if key not in understood | HARMLESS and value not in (None, [], {})
    )
    if unknown:
        raise ModelError(
            f"config.json of {architecture} has keys that rlpipe does not know and must not ignore: "
            f"{', '.join(unknown)}: remove them if they change nothing, or use a supported model"
        )


def fill_defaults(raw: dict[str, Any], model_type: str) -> dict[str, Any]:
    """All fields of transformers' configuration class for `model_type`, with `raw`'s values where it has them.

    Raises:
        ModelError: transformers refuses the values.
    """
    from transformers import CONFIG_MAPPING

    values = {key: value for key, value in raw.items() if key not in {"architectures", "model_type", "auto_map"}}
    values = copy.deepcopy(values)  # transformers completes some of them in place
    try:
        config = CONFIG_MAPPING[model_type](**values)
    except Exception as error:  # transformers raises several unrelated types for wrong values
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"transformers refuses the {model_type} configuration: {first_line}") from error
    return config.to_dict()


def stored_tensors(source: str | Path | dict[str, Any]) -> frozenset[str]:
    """Names of the weights beside the configuration; empty where there are none."""
    if isinstance(source, dict) or not Path(source).is_dir():
        return frozenset()
    return frozenset(tensor_files(Path(source)))


def tensor_files(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file of a model folder; empty without such files.

    Raises:
        ModelError: the index names a file that is not there, or a file is not safetensors.
    """
    from safetensors import SafetensorError, safe_open

    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        try:
            files = {name: model_dir / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a readable index of weights ({error}): download it again") from None
        if missing := sorted({str(path) for path in files.values() if not path.exists()}):
            raise ModelError(f"{index} names {missing[0]}, which does not exist: download the model again")
        return files
    files = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), path))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}): download the model again") from None
    return files
