"""Make whatever the `prepare` section asks for and is not there yet."""

from pathlib import Path

from rlpipe.config.root import Config
from rlpipe.errors import ConfigError
from rlpipe.prepare.arithmetic import write_arithmetic


def prepare(config: Config) -> list[Path]:
    """Returns the folders that were made; what exists is left as it is."""
    made = []
    if config.prepare.policy and not (Path(config.model.path) / "config.json").exists():
        from rlpipe.prepare.policy import make_tiny_policy

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
