"""From a Hugging Face `config.json` to the shape of the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.flops.layers import DecoderLayer
from rlpipe.flops.shape import ModelShape
from rlpipe.flops.vision import VisionTower
from rlpipe.model.hf_families import FAMILIES, Family
from rlpipe.model.hf_section import Section
from rlpipe.model.hub import HubName, model_config_file
from rlpipe.shared.errors import ModelError

MODELS_FOLDER = Path(__file__).resolve().parents[2] / "configs" / "models"

_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "mtp_num_layers")


def load_model_shape(model: str | Path) -> ModelShape:
    """The shape of `model`: a config.json, a folder that holds one, the name of a folder in configs/models or of a hub
    model.

    ModelError if there is no such file, if it is no JSON object, or if its architecture cannot be counted.
    """
    path = find_config(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, expected a JSON object with a model's configuration")
    return model_shape(config, place=str(path))


def find_config(model: str | Path) -> Path:
    """Path of the config.json that `model` means; ModelError, naming the bundled models, if there is none."""
    given = Path(model)
    for candidate in (given, given / "config.json", MODELS_FOLDER / given / "config.json"):
        if candidate.is_file():
            return candidate
    if not given.exists() and HubName.parse(str(model)):
        return model_config_file(model)
    bundled = sorted(path.parent.name for path in MODELS_FOLDER.glob("*/config.json"))
    raise ModelError(
        f"no model config at {str(model)!r}: give a config.json, a folder with one, or a name on the hub"
        + (f", or one of {', '.join(bundled)}" if bundled else "")
    )


def model_shape(config: Mapping[str, Any], place: str = "the model config") -> ModelShape:
    """The shape described by an HF config (a vision-language config nests the decoder in `text_config`).

    ModelError if the model type is unknown, a size is missing, or a field that may change the maths is not understood.
    `place` names the config in messages.
    """
    top = Section(config, place)
    nested = top.get("text_config")
    text = top if nested is None else Section(_mapping(nested, place, "text_config"), f"{place} (text_config)")
    model_type = text.get("model_type") or top.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise ModelError(
            f"{place}: the FLOPs of model type {model_type!r} cannot be counted; known are {', '.join(FAMILIES)}"
        )
    mixers, feed_forwards = family.mixers(text), family.feed_forwards(text)
    shape = ModelShape(
        model_type=str(model_type),
        hidden_size=text.integer("hidden_size"),
        vocab_size=text.integer("vocab_size"),
        layers=tuple(DecoderLayer(*parts) for parts in zip(mixers, feed_forwards, strict=True)),
        mtp_layers=_mtp_layers(top, text),
        vision=_vision_tower(top, place, family),
    )
    text.refuse_unread(shape.model_type)
    if text is not top:
        top.ignore(*(key for key, value in config.items() if nested.get(key) == value))
        top.refuse_unread(shape.model_type)
    return shape


def _mtp_layers(*sections: Section) -> int:
    """Multi-token-prediction depths under any of their names; several names must agree."""
    found = {
        section.integer(key, minimum=0): (section, key) for section in sections for key in _MTP_KEYS if section.has(key)
    }
    if len(found) > 1:
        section, key = found[min(found)]
        raise section.error(key, f"other keys for the number of MTP layers say {max(found)}")
    return next(iter(found), 0)


def _vision_tower(top: Section, place: str, family: Family) -> VisionTower | None:
    values = top.get("vision_config")
    if not values:
        return None
    section = Section(_mapping(values, place, "vision_config"), f"{place} (vision_config)")
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


def _mapping(value: Any, place: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{place}: {key!r} is {value!r}, expected an object")
    return value
