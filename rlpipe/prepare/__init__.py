"""What a run may make before it starts, from its seed alone: a tiny policy, its tokenizer, a generated task."""

from pathlib import Path

from rlpipe.config.root import Config
from rlpipe.prepare.arithmetic import write_arithmetic
from rlpipe.shared.errors import ConfigError


def prepare(config: Config) -> list[Path]:
    """Returns the folders that were made; what exists is left as it is."""
    made = []
    if config.prepare.policy and not Path(config.model.path).name:
        raise ConfigError(
            f"model.path is {config.model.path!r}, where prepare.policy can make no folder; name a new one"
        )
    if config.prepare.policy and not (Path(config.model.path) / "config.json").exists():
        from rlpipe.prepare.tiny_policy import make_tiny_policy

        make_tiny_policy(config.prepare.policy, Path(config.model.path), config.seed)
        made.append(Path(config.model.path))
    if config.prepare.arithmetic:
        if not config.prepare.directory:
            raise ConfigError("prepare.directory is empty: say where prepare.arithmetic is to write its problems")
        folder = Path(config.prepare.directory)
        if not (folder / "test.jsonl").exists():
            write_arithmetic(config.prepare.arithmetic, folder, config.seed)
            made.append(folder)
    return made
