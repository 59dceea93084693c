"""What a run may make before it starts, from its seed alone: a tiny policy, its tokenizer, a generated task."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rlpipe.config.root import Config
from rlpipe.model.config_file import read_json_object
from rlpipe.prepare.arithmetic import Row, arithmetic_rows, rows_text, write_rows
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import tried_function

_SIZES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key_value_heads",
    "head_dim": "head_dim",
}
"""Of a tiny policy: names in config.json, and their settings."""
_TASK_ROWS = "rlpipe.environments.environment_registry:task_rows"  # of a room above this one


def prepare(config: Config) -> list[Path]:
    """Returns the folders that were made; what exists is left as it is."""
    made = []
    policy = Path(config.model.path)
    if config.prepare.policy and not (policy / "config.json").exists():
        from rlpipe.prepare.tiny_policy import make_tiny_policy

        _check_is_free(policy)
        make_tiny_policy(config.prepare.policy, policy, config.seed)
        made.append(policy)
    if config.prepare.arithmetic or config.prepare.tasks:
        if not config.prepare.directory:
            raise ConfigError("prepare.directory is empty: say where generated data is to be written")
        folder = Path(config.prepare.directory)
        if not (folder / "test.jsonl").exists():
            write_rows(folder, *_generated_rows(config))
            made.append(folder)
    return made


def _generated_rows(config: Config) -> tuple[Iterable[Row], Iterable[Row]]:
    """Rows for training and for a test."""
    if config.prepare.arithmetic:
        return arithmetic_rows(config.prepare.arithmetic, config.seed)
    settings, tasks = config.rollout.generate.environment, config.prepare.tasks
    if settings is None or tasks is None:
        raise ConfigError(
            "prepare.tasks are made by an environment, but rollout.generate.environment is empty: name it there"
        )
    rows: tuple[Iterable[Row], Iterable[Row]] = tried_function(_TASK_ROWS, {}, "prepare.tasks")(
        settings, tasks.train, tasks.test, config.seed
    )
    return rows


def kept_though_different(config: Config) -> Iterator[str]:
    """A sentence for each thing that was there already and is not what `prepare` would have made."""
    folder, shape = Path(config.model.path), config.prepare.policy
    if shape is not None and (folder / "config.json").exists():
        told = read_json_object(folder / "config.json")
        wanted = {name: getattr(shape, field) for name, field in _SIZES.items()}
        if differing := [f"{name} {told[name]}" for name, value in wanted.items() if told.get(name, value) != value]:
            yield f"{folder} was there and is used as it is, with {', '.join(differing)}, unlike prepare.policy"
    if config.prepare.arithmetic and config.prepare.directory:
        for name, rows in zip(("train", "test"), arithmetic_rows(config.prepare.arithmetic, config.seed), strict=True):
            file = Path(config.prepare.directory) / f"{name}.jsonl"
            if file.exists() and file.read_text(errors="replace") != rows_text(rows):
                yield f"{file} was there and is used as it is, unlike prepare.arithmetic"


def _check_is_free(policy: Path) -> None:
    """Raise ConfigError where no new folder can be made."""
    if policy.name in ("", "..") or (policy.exists() and not (policy.is_dir() and not any(policy.iterdir()))):
        raise ConfigError(
            f"model.path is {str(policy)!r}, which holds something, but no policy: name a folder that prepare.policy "
            "can make, or one with a policy"
        )
