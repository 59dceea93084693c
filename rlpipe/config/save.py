"""Writing the resolved configuration, without secrets."""

import re
from typing import Any

from rlpipe.config.root import Config
from rlpipe.config.strict_yaml import dump_yaml

_SECRET_KEY = re.compile(r"api_?key|token$|secret|passw|credential|authorization|private_?key", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(\w+://)[^/@\s]+@")
_HIDDEN = "<hidden>"


def resolved_yaml(config: Config) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back.

    Values under keys that name a secret, and user names in URLs, are replaced by `<hidden>`.
    """
    return dump_yaml(_hide_secrets(config.model_dump(mode="json")))


def _hide_secrets(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _hide_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_hide_secrets(item, key) for item in value]
    if isinstance(value, str):
        return _HIDDEN if _SECRET_KEY.search(key) else _USER_IN_URL.sub(rf"\1{_HIDDEN}@", value)
    return value
