"""From a config.json to the description of the model: the one way in which rlpipe reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.flops.vision import VisionTower
from rlpipe.model.config_file import ConfigFile, generated_end_tokens, mapping, read_config
from rlpipe.model.config_section import Section
from rlpipe.model.description import ModelDescription, TrainableModel
from rlpipe.model.families import FAMILIES, Family, Training
from rlpipe.model.hub import model_folder
from rlpipe.model.trained_maths import (
    WRAPPER_KEYS,
    fill_defaults,
    number,
    read_rope,
    refuse_ignored_keys,
    refuse_other_maths,
    refuse_unknown_keys,
)
from rlpipe.model.weight_checks import tensor_files
from rlpipe.shared.errors import ModelError

_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "mtp_num_layers")
PREDICTION_TENSOR = "mtp.fc.weight"
"""Of a multi-token-prediction layer. Qwen3-Next's configuration does not say that its weights hold one."""


_FUSED_EXPERTS = ".mlp.experts.gate_up_proj"


def describe_model(source: str | Path | Mapping[str, Any], stored: frozenset[str] = frozenset()) -> ModelDescription:
    """The model of any known family at `source`, which is found as `read_config` finds it. Reads no weights.

    stored: names of weights that are there; a configuration may be silent about a prediction layer among them.

    Raises:
        ModelError: the file cannot be read, its model type is unknown, a size is missing, or a field that may change
            the layers is not understood.
    """
    return _describe(read_config(source), stored)


def trainable_model(source: str | Path | Mapping[str, Any]) -> TrainableModel:
    """The model of a folder, of a hub name, or of a configuration, for the actor. Of the weights, names alone are read.

    Raises:
        ModelError: as `describe_model`, or the architecture or a configuration key is not supported in training.
    """
    source = source if isinstance(source, Mapping) else model_folder(source)
    file = read_config(source)
    family, training = _trained_family(file)
    stored = frozenset() if isinstance(source, Mapping) or not source.is_dir() else frozenset(tensor_files(source))
    model = _describe(file, stored)
    config = _understood(file, training, model)
    _refuse_other_defaults(model, family, Section(config, file.place))
    return TrainableModel(
        **vars(model) | {"max_positions": Section(config, file.place).integer("max_position_embeddings")},
        norm_epsilon=number("rms_norm_eps", config["rms_norm_eps"], 1.0),
        zero_centered_norm=training.zero_centered_norm,
        rope=read_rope(config, model.head_dim),
        qkv_bias=training.qkv_bias,
        qk_norm=training.qk_norm,
        normalize_top_k=bool(config.get("norm_topk_prob"))
        if training.normalize_top_k is None
        else training.normalize_top_k,
        weight_prefix="model.language_model." if model.architecture in training.wrappers else "model.",
        fused_experts=any(name.endswith(_FUSED_EXPERTS) and not name.startswith("mtp.") for name in stored),
        fused_mtp_experts=f"mtp.layers.0{_FUSED_EXPERTS}" in stored,
    )


def end_tokens(folder: Path) -> frozenset[int]:
    """Token ids that end a response of the model in `folder`, by its config.json and generation_config.json, as SGLang
    joins them."""
    return describe_model(folder).end_tokens | generated_end_tokens(folder)


def _describe(file: ConfigFile, stored: frozenset[str]) -> ModelDescription:
    """`stored`: names of the weights, where they are known."""
    family = FAMILIES.get(file.model_type)
    if family is None:
        trained = [name for name, one in FAMILIES.items() if one.training]
        counted = [name for name, one in FAMILIES.items() if not one.training]
        raise ModelError(
            f"{file.place}: model type {file.model_type!r} is not supported: {', '.join(trained)} can be trained, "
            f"{', '.join(counted)} only be counted"
        )
    top = Section(file.raw, file.place)
    text = top if file.text is file.raw else Section(file.text, file.text_place)
    mtp_layers = _mtp_layers(top, text)
    model = ModelDescription(
        **vars(family.mixers(text)),
        **vars(family.feed_forwards(text)),
        model_type=file.model_type,
        architecture=next(iter(file.architectures), ""),
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        tied_embeddings=top.boolean("tie_word_embeddings", False),  # never the text's: so do transformers and SGLang
        max_positions=text.integer("max_position_embeddings") if text.has("max_position_embeddings") else None,
        end_tokens=file.end_tokens,
        mtp_layers=int(PREDICTION_TENSOR in stored) if mtp_layers is None else mtp_layers,
        vision=_vision_tower(top, file.place, family),
    )
    text.refuse_unread(model.model_type)
    if text is not top:
        top.ignore("text_config", *(key for key, value in file.raw.items() if file.text.get(key) == value))
        top.refuse_unread(model.model_type)
    return model


def _mtp_layers(*sections: Section) -> int | None:
    """Multi-token-prediction depths under any of their names, which must agree; None where there is none."""
    found = {
        section.integer(key, minimum=0): (section, key) for section in sections for key in _MTP_KEYS if section.has(key)
    }
    if len(found) > 1:
        section, key = found[min(found)]
        raise section.error(key, f"other keys for the number of MTP layers say {max(found)}")
    return next(iter(found), None)


def _vision_tower(top: Section, place: str, family: Family) -> VisionTower | None:
    values = top.get("vision_config")
    if not values:
        return None
    section = Section(mapping(values, place, "vision_config"), f"{place} (vision_config)")
    section.ignore("num_heads")
    deepstack_mergers = len(section.items("deepstack_visual_indexes"))
    if deepstack_mergers and not family.deepstack:
        raise section.error("deepstack_visual_indexes", "this model type has no deepstack mergers")
    tower = VisionTower(
        hidden_size=section.integer("hidden_size"),
        intermediate_size=section.integer("intermediate_size"),
        depth=section.integer("depth"),
        input_values_per_patch=section.integer("in_channels", 3)
        * section.integer("temporal_patch_size", 2)
        * _patch_area(section),
        spatial_merge_size=section.integer("spatial_merge_size", 2),
        output_size=section.integer("out_hidden_size"),
        deepstack_mergers=deepstack_mergers,
    )
    section.refuse_unread(str(top.get("model_type")))
    return tower


def _patch_area(section: Section) -> int:
    """`patch_size` is the side of a square, or its two sides."""
    sides = section.get("patch_size")
    if not isinstance(sides, list | tuple):
        return section.integer("patch_size") ** 2
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise section.error("patch_size", "expected one side or two")
    return int(sides[0]) * int(sides[1])


def _trained_family(file: ConfigFile) -> tuple[Family, Training]:
    """Of the one class that the file names; ModelError where the actor does not train it."""
    trained = {
        name: (family, family.training)
        for family in FAMILIES.values()
        if family.training
        for name in (*family.training.classes, *family.training.wrappers)
    }
    architecture = file.architecture
    if architecture not in trained:
        known = FAMILIES.get(file.model_type)
        counted = f" (model type {file.model_type!r} can only be counted)" if known and not known.training else ""
        raise ModelError(
            f"architecture {architecture!r} is not supported in training{counted}: supported are "
            f"{', '.join(sorted(trained))}"
        )
    family, training = trained[architecture]
    if FAMILIES.get(file.model_type, family) is not family:
        raise ModelError(
            f"{file.place} has architectures = [{architecture!r}], which is no {file.model_type!r} (model_type): "
            "correct the one that is wrong"
        )
    return family, training


def _understood(file: ConfigFile, training: Training, model: ModelDescription) -> dict[str, Any]:
    """The decoder's part of the file with defaults filled in; ModelError for what the actor would not compute."""
    nested = model.architecture in training.wrappers and file.text is not file.raw
    text = dict(file.text if nested else file.raw)
    if nested:
        refuse_unknown_keys(file.raw, WRAPPER_KEYS, model.architecture)
        text["tie_word_embeddings"] = model.tied_embeddings
    refuse_unknown_keys(text, training.keys, model.architecture)
    config = fill_defaults(text, training.defaults)
    refuse_other_maths(config, text)
    if not training.partial_rotary:
        refuse_ignored_keys(config, text, model.architecture)
    return config


def _refuse_other_defaults(model: ModelDescription, family: Family, completed: Section) -> None:
    """Refuse a file that leaves out what transformers fills in otherwise than the family's row does."""
    filled = vars(family.mixers(completed)) | vars(family.feed_forwards(completed))
    filled["tied_embeddings"] = completed.boolean("tie_word_embeddings", False)
    for name, value in filled.items():
        if name != "mlp_width" and getattr(model, name) != value:
            raise ModelError(
                f"config.json leaves out a key with another default in transformers: {name} would be "
                f"{getattr(model, name)} here and {value} there; add the key to the file"
            )
