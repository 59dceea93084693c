"""Weights & Biases, online or offline. The API key comes from the environment (`WANDB_API_KEY`)."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import wandb
import yaml

from rlpipe.config.root import Config
from rlpipe.config.save import resolved_yaml
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.tracker import SampleRow
from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.errors import ConfigError

# Without what it collects by itself: the command line, the address of the git repository, what the run prints.
_SETTINGS = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, x_disable_meta=True)


class WeightsAndBiases:
    """One run; its id is kept in the run folder, so a resumed run continues the same curves."""

    def __init__(self, config: Config, directory: RunDirectory) -> None:
        id_file = directory.path / "wandb_run_id"
        if not id_file.exists():
            write_atomically(id_file, secrets.token_hex(4).encode())
        try:
            self._run = wandb.init(
                project=config.trackers.wandb_project,
                name=config.run.name,
                id=id_file.read_text(),
                resume="allow",
                mode="online" if config.trackers.wandb == "online" else "offline",
                dir=str(directory.path),
                config=yaml.safe_load(resolved_yaml(config)),
                settings=_SETTINGS,
            )
        except (wandb.Error, OSError) as error:
            raise ConfigError(
                f"trackers.wandb is {config.trackers.wandb!r} but the run cannot start: {error}; set WANDB_API_KEY in "
                "the environment, or trackers.wandb to 'offline'"
            ) from None

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def log_samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        if rows:
            columns: list[Any] = list(rows[0])
            cells: list[Any] = [[str(row.get(name, "")) for name in columns] for row in rows]
            table = wandb.Table(columns=columns, data=cells)
            self._run.log({"samples": table}, step=iteration)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
