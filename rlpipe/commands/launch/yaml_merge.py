"""Raw YAML laid over a manifest, as Kubernetes merges it: lists of things with names by name."""

from collections.abc import Mapping
from typing import Any


def merge_named(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`. Mappings merge; lists whose elements all have a `name` merge by it; null removes a key;
    everything else replaces.
    """
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge_named(below, value)
        elif isinstance(below, list) and _named(below) and _named(value):
            merged[key] = _merge_lists(below, value)
        else:
            merged[key] = value
    return merged


def _named(value: Any) -> bool:
    """Whether names tell the elements apart, which those of volumeMounts do not always."""
    if not isinstance(value, list) or not value:
        return False
    names = [element.get("name") if isinstance(element, Mapping) else None for element in value]
    return None not in names and len(set(names)) == len(names)


def _merge_lists(under: list[dict[str, Any]], over: list[dict[str, Any]]) -> list[dict[str, Any]]:
    laid = {element["name"]: element for element in under}
    for element in over:
        name = element["name"]
        laid[name] = merge_named(laid[name], element) if name in laid else element
    return list(laid.values())
