"""From a Hugging Face `config.json` to the shape of the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.flops.layers import DecoderLayer
from rlpipe.flops.shape import ModelShape
from rlpipe.flops.vision import VisionTower
from rlpipe.model.config_file import ConfigFile, mapping, read_config
from rlpipe.model.hf_families import FAMILIES, Family
from rlpipe.model.hf_section import Section
from rlpipe.shared.errors import ModelError

_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "mtp_num_layers")


def load_model_shape(model: str | Path) -> ModelShape:
    """The shape of `model`, which is found as `read_config` finds it. ModelError if it cannot be read or counted."""
    return _shape_of(read_config(model))


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape described by an HF config (a vision-language config nests the decoder in `text_config`).

    ModelError if the model type is unknown, a size is missing, or a field that may change the maths is not understood.
    """
    return _shape_of(ConfigFile(config, "the model config"))


def _shape_of(file: ConfigFile) -> ModelShape:
    family = FAMILIES.get(file.model_type)
    if family is None:
        raise ModelError(
            f"{file.place}: the FLOPs of model type {file.model_type!r} cannot be counted; known are "
            f"{', '.join(FAMILIES)}"
        )
    top = Section(file.raw, file.place)
    text = top if file.text is file.raw else Section(file.text, file.text_place)
    mixers, feed_forwards = family.mixers(text), family.feed_forwards(text)
    shape = ModelShape(
        model_type=file.model_type,
        hidden_size=text.integer("hidden_size"),
        vocab_size=text.integer("vocab_size"),
        layers=tuple(DecoderLayer(*parts) for parts in zip(mixers, feed_forwards, strict=True)),
        mtp_layers=_mtp_layers(top, text),
        vision=_vision_tower(top, file.place, family),
    )
    text.refuse_unread(shape.model_type)
    if text is not top:
        top.ignore("text_config", *(key for key, value in file.raw.items() if file.text.get(key) == value))
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
