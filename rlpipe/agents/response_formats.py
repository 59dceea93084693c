"""`response_format`: the JSON that an agent wants an answer to be, and whether an answer is.

No grammar is enforced. Under one, tokens come from the policy's distribution cut down and normalized again: their
log-probabilities would not be the policy's, and a gradient that takes them for its own is biased.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from rlpipe.agents.refusal import Refusal


@dataclass(frozen=True)
class ResponseFormat:
    """`schema` None: any JSON object."""

    schema: Mapping[str, Any] | None

    def fits(self, text: str) -> bool:
        """Whether `text` is JSON as it is wanted."""
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return False
        if self.schema is None:
            return isinstance(value, dict)
        try:  # with a registry of nothing, so that no schema has this process fetch another one
            return bool(Draft202012Validator(dict(self.schema), registry=Registry()).is_valid(value))
        except (Unresolvable, RecursionError):
            return False


def response_format(value: Any) -> ResponseFormat | None:
    """That of a request; None for plain text. Raises Refusal for what is malformed."""
    kind = value.get("type", "text") if isinstance(value, Mapping) else value
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return ResponseFormat(None)
    if kind != "json_schema":
        raise Refusal(f"response_format is of type {str(kind)[:80]!r}: use text, json_object or json_schema")
    told = value.get("json_schema")
    schema = told.get("schema") if isinstance(told, Mapping) else None
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise Refusal(f"response_format.json_schema.schema is no JSON schema: {error.message[:200]}") from None
    if not isinstance(schema, Mapping):
        raise Refusal("response_format.json_schema.schema is no object")
    return ResponseFormat(schema)
