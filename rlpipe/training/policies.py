"""The policy in Hugging Face layout: which of a run's policies are written, and what is told of them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.config.root import Config
from rlpipe.model.hub import model_folder
from rlpipe.monitoring.json_lines import read_json_lines
from rlpipe.monitoring.model_card import model_card
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.policy_facts import PolicyFacts
from rlpipe.training.checkpoints import checkpoint_is_due

if TYPE_CHECKING:
    from actor.group import ActorGroup


class PolicyFolders:
    """Writes what `checkpoint.save_hf` asks for. `resident`: a context in which the actor's weights can be read."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        actor: "ActorGroup",
        resident: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._config = config
        self._directory = directory
        self._actor = actor
        self._resident = resident

    def after_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write the policy of a checkpoint with `every`, and the best one so far with `best`."""
        choice = self._config.checkpoint.save_hf
        if choice == "every" and checkpoint_is_due(self._config, iteration):
            self._write(self._directory.policy_of(iteration), iteration, metrics)
        if choice == "best" and self._is_best(metrics):
            self._write(self._directory.best_policy, iteration, metrics)

    def after_training(self) -> None:
        """Write the final policy, unless `never`."""
        if self._config.checkpoint.save_hf != "never":
            self._write(self._directory.policy, self._config.run.iterations, {})

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        name = self._config.best_metric
        if self._config.checkpoint.best_metric is None and name not in metrics:
            name = name.replace("/accuracy", "/reward_mean")  # of graders that give numbers alone
        if name not in metrics:
            return False
        before = PolicyFacts.read(self._directory.best_policy)
        if before is None or name not in before.metrics:
            return True
        now, best = metrics[name], before.metrics[name]
        return now < best if name.endswith("/loss") else now > best

    def _write(self, folder: Path, iteration: int, metrics: Mapping[str, float]) -> None:
        folder.parent.mkdir(exist_ok=True)
        with self._resident():
            self._actor.save_hf(folder, policy_facts(self._config, self._directory, iteration, metrics))


def policy_facts(
    config: Config, directory: RunDirectory, iteration: int, metrics: Mapping[str, float] | None = None
) -> PolicyFacts:
    """What is told of the policy after `iteration`. metrics: those of an iteration that is not logged yet."""
    rows = [*read_json_lines(directory.metrics).rows, {"iteration": iteration, **(metrics or {})}]
    evaluated = {
        name: value
        for row in rows
        if row["iteration"] <= iteration
        for name, value in row.items()
        if name.startswith("eval/")
    }
    readme = model_folder(config.model.path) / "README.md"
    source_card = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    return PolicyFacts(config.run.name, iteration, evaluated, model_card(config, iteration, rows, source_card))
