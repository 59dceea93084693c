"""The base of every configuration section."""

import re
import string
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

_NAME = re.compile(r"\w[\w.+@=-]*")
_MAX_NAME_BYTES = 128
_RAY_ADDRESS = re.compile(r"(?:(?:ray://)?[\w.\-]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")
_LARGEST_WHOLE = 2**63 - 1
_SMALLEST, _LARGEST = 1e-30, 1e30  # what is left of a number in float32, with room for products
_LONGEST_SECONDS = 1e9


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        shown = ascii(name) if len(name) <= _MAX_NAME_BYTES else f"{len(name)} characters long"
        raise ValueError(
            f"the name is {shown}; use letters, digits and _ - . + @ =, beginning with a letter, digit or _, at most "
            f"{_MAX_NAME_BYTES} bytes"
        )
    return name


Name = Annotated[str, AfterValidator(_checked_name)]
"""A name that becomes a file's name or part of a metric's: no slash, no blank, not hidden, not too long."""


def is_ray_address(text: str) -> bool:
    """Whether Ray can be asked for a cluster at `text`: `auto`, or host:port."""
    found = _RAY_ADDRESS.fullmatch(text)
    return text == "auto" or (found is not None and 0 < int(found["port"]) < 2**16)


def _checked_ray_address(address: str) -> str:
    if not is_ray_address(address):
        raise ValueError(
            f"the address is {ascii(address)[:100]}: give host:port of a Ray head, or auto on one of its nodes"
        )
    return address


RayAddress = Annotated[str, AfterValidator(_checked_ray_address)]
"""Where a Ray cluster runs."""


def template_fields(template: str) -> list[str]:
    """The columns that a format string names, in order; ValueError for one that is malformed, or asks for more."""
    fields = []
    for _, field, form, conversion in string.Formatter().parse(template):
        if field is None:
            continue
        if not field.isidentifier():
            raise ValueError(
                f"the template {template[:100]!r} has {{{field}}}, but only names of columns can stand there"
            )
        if form or conversion:
            raise ValueError(
                f"the template {template[:100]!r} formats {{{field}}}, which is put in as it is; write {{{field}}}"
            )
        fields.append(field)
    return fields


def _checked_top_k(count: int) -> int:
    if count == 0 or count < -1:
        raise ValueError(f"top_k is {count}: give how many of the most likely tokens are kept, or -1 for all")
    return count


TopK = Annotated[int, AfterValidator(_checked_top_k)]
"""How many of the most likely tokens are kept; -1: all."""

LEAST_TEMPERATURE = 1e-5
"""SGLang takes lower ones for greedy sampling, with log-probabilities of temperature 1."""


def _checked_temperature(temperature: float) -> float:
    if temperature != 0 and temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"the temperature is {temperature:g}: give at least {LEAST_TEMPERATURE:g}, or 0 where greedy is allowed"
        )
    return temperature


Temperature = Annotated[float, AfterValidator(_checked_temperature)]
"""Of a softmax; 0 is greedy."""


def _checked_template(template: str) -> str:
    template_fields(template)
    return template


Template = Annotated[str, AfterValidator(_checked_template)]
"""A Python format string with names of columns in braces, and nothing more in them."""


class Section(BaseModel):
    """A frozen section. The docstring under a field is its help; a key that no field has is an error.

    Types are strict: true is not 1, "1" is not 1, no number is infinite or NaN, or too large or small to compute with,
    and no text is blank.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @model_validator(mode="after")
    def _values_can_be_used(self) -> Self:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.default and (problem := _problem(name, value)):
                raise ValueError(f"{name} {problem}")
        return self


def _problem(name: str, value: Any) -> str | None:
    if isinstance(value, str):
        return None if value.strip() else "is blank; give a text, or leave the key out"
    if isinstance(value, list):
        return "holds an empty text; remove it" if "" in value else None
    if isinstance(value, bool) or not isinstance(value, int | float) or value == 0:
        return None
    if name.endswith("_seconds") and value > _LONGEST_SECONDS:
        return f"is {value:g} seconds, longer than anyone waits; give at most {_LONGEST_SECONDS:g}"
    if isinstance(value, int):
        return f"is {value}, more than {_LARGEST_WHOLE}" if abs(value) > _LARGEST_WHOLE else None
    return None if _SMALLEST <= abs(value) <= _LARGEST else f"is {value:g}, which cannot be computed with in float32"
