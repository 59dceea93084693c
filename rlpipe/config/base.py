"""The base of every configuration section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section. The docstring under a field is its help; a key that no field has is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
