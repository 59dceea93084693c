"""Writing the resolved configuration, without secrets."""

from rlpipe.config.root import Config
from rlpipe.config.strict_yaml import dump_yaml
from rlpipe.shared.secret_text import hide_in_tree


def resolved_yaml(config: Config) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back.

    Values under keys that name a secret, and what opens something in URLs, are replaced by `<hidden>`.
    """
    return dump_yaml(hide_in_tree(config.model_dump(mode="json")))
