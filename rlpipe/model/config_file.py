"""The config.json of a model as it stands in its folder: where it is, and what every architecture says in it alike.

`rlpipe.model.model_reader` makes a description of it, which is what everything else reads.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.model.hub import HubName, model_config_file
from rlpipe.shared.errors import ModelError
from rlpipe.shared.project_files import MODELS
from rlpipe.shared.regular_file import read_regular


@dataclass(frozen=True)
class ConfigFile:
    """`raw`: the whole object; `place` names it in messages."""

    raw: Mapping[str, Any]
    place: str

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the decoder, which a vision-language model nests in `text_config`; ModelError if that is no
        object."""
        nested = self.raw.get("text_config")
        return self.raw if nested is None else mapping(nested, self.place, "text_config")

    @property
    def text_place(self) -> str:
        return self.place if self.text is self.raw else f"{self.place} (text_config)"

    @property
    def model_type(self) -> str:
        """Of the decoder."""
        return str(self.text.get("model_type") or self.raw.get("model_type"))

    @property
    def architectures(self) -> tuple[str, ...]:
        names = self.raw.get("architectures")
        return tuple(str(name) for name in names) if isinstance(names, list) else ()

    @property
    def architecture(self) -> str:
        """The one class name under `architectures`; ModelError if there is another number of them."""
        if len(self.architectures) != 1:
            raise ModelError(
                f"{self.place} has architectures = {self.raw.get('architectures')!r}: exactly one class name is needed"
            )
        return self.architectures[0]

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end a response; a generation_config.json may name more."""
        return _token_ids(self.raw.get("eos_token_id")) | _token_ids(self.text.get("eos_token_id"))


def read_config(model: str | Path | Mapping[str, Any]) -> ConfigFile:
    """Of `model`: a config.json, a folder that holds one, the name of a folder in configs/models or of a hub model, or
    what such a file holds. Raises ModelError if there is none, or it is no JSON object."""
    if isinstance(model, Mapping):
        return ConfigFile(model, "config.json")
    path = find_config(model)
    return ConfigFile(read_json_object(path), str(path))


def find_config(model: str | Path) -> Path:
    """Path of the config.json that `model` means; ModelError, naming the bundled models, if there is none."""
    given = Path(model)
    for candidate in (given, given / "config.json", MODELS / given / "config.json"):
        if candidate.is_file():
            return candidate
    if not given.exists() and HubName.parse(str(model)):
        return model_config_file(model)
    bundled = sorted(path.parent.name for path in MODELS.glob("*/config.json"))
    others = f", or one of {', '.join(bundled)}" if bundled else ""
    raise ModelError(
        f"no model config at {str(model)!r}: give a config.json, a folder with one, a name on the hub{others}"
    )


def generated_end_tokens(folder: Path) -> frozenset[int]:
    """Token ids that end a response by the generation_config.json of `folder`; none without such a file."""
    generation = folder / "generation_config.json"
    generated = read_json_object(generation).get("eos_token_id") if generation.exists() else None
    if any(type(one) is not int for one in _as_list(generated)):
        raise ModelError(f"{generation}: 'eos_token_id' is {generated!r}, expected a token id or a list of them")
    return _token_ids(generated)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the file; ModelError if there is none."""
    try:
        raw = json.loads(read_regular(path))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: give a folder with a Hugging Face config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): download the model again") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds {type(raw).__name__}, not a JSON object: download the model again")
    return raw


def mapping(value: Any, place: str, key: str) -> Mapping[str, Any]:
    """`value`, if it is an object; ModelError otherwise."""
    if not isinstance(value, Mapping):
        raise ModelError(f"{place}: {key!r} is {value!r}, expected an object")
    return value


def _token_ids(value: Any) -> frozenset[int]:
    return frozenset(one for one in _as_list(value) if isinstance(one, int))


def _as_list(value: Any) -> list[Any]:
    """Of what may stand alone, in a list, or not at all."""
    return value if isinstance(value, list) else [] if value is None else [value]
