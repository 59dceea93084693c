"""The folder of a run: configuration, metrics, samples, checkpoints, logs, report."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.config.root import Config
from rlpipe.config.save import resolved_yaml
from rlpipe.shared.errors import ConfigError


@dataclass(frozen=True)
class RunDirectory:
    """Where everything of a run lies. Paths that do not exist yet are made by whoever writes there first."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> "RunDirectory":
        return cls(Path(config.run.directory) / config.run.name)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def jit_events(self) -> Path:
        return self.logs / "jit.jsonl"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks.jsonl"

    def trace(self, iteration: int) -> Path:
        return self.path / "traces" / f"iteration_{iteration:06d}.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    @property
    def reference(self) -> Path:
        return self.path / "reference"

    @property
    def logs(self) -> Path:
        return self.path / "logs"


def open_run_directory(config: Config, resume: bool, overwrite: bool) -> RunDirectory:
    """Make the run's folder, or open it to resume. The resolved configuration is saved in it.

    Raises ConfigError when the folder holds a run and neither `resume` nor `overwrite` is set.
    """
    directory = RunDirectory.of(config)
    if directory.config.exists() and overwrite and not resume:
        shutil.rmtree(directory.path)
    if directory.config.exists() and not resume:
        raise ConfigError(
            f"{directory.path} already holds a run: continue it with --resume, replace it with --overwrite, "
            "or choose another run.name"
        )
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.config.write_text(resolved_yaml(config))
    return directory


def append_json_line(path: Path, row: dict[str, Any]) -> None:
    """Append one row. A row is written whole, so a reader never meets half of one."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All rows of a file; none when it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def drop_rows_from(path: Path, iteration: int) -> None:
    """Remove the rows of `iteration` and later: a resumed run makes them again."""
    kept = [row for row in read_json_lines(path) if row["iteration"] < iteration]
    if path.exists():
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
