"""The base of every configuration section."""

import re
import string
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

_NAME = re.compile(r"\w[\w.+@=-]*")
_MAX_NAME_BYTES = 128


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


def _checked_template(template: str) -> str:
    template_fields(template)
    return template


Template = Annotated[str, AfterValidator(_checked_template)]
"""A Python format string with names of columns in braces, and nothing more in them."""


class Section(BaseModel):
    """A frozen section. The docstring under a field is its help; a key that no field has is an error.

    Types are strict: true is not 1, "1" is not 1, and no number is infinite or NaN.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )
