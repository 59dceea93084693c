"""The folder of a run: configuration, metrics, samples, checkpoints, logs, report."""

from dataclasses import dataclass
from pathlib import Path

from rlpipe.config.root import Config


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
    def episodes(self) -> Path:
        return self.path / "episodes.jsonl"

    @property
    def responses(self) -> Path:
        return self.path / "responses.jsonl"

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
    def best_policy(self) -> Path:
        return self.path / "best_policy"

    def policy_of(self, iteration: int) -> Path:
        return self.path / "policies" / f"iteration_{iteration:08d}"

    @property
    def reference(self) -> Path:
        return self.path / "reference"

    @property
    def logs(self) -> Path:
        return self.path / "logs"
