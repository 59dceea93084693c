"""Which grader grades which prompt: by a column of its row, by its data set, or the one of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rewards.grader_registry import GRADERS, check_grader
from rlpipe.config.data import DatasetConfig
from rlpipe.config.reward import RewardConfig
from rlpipe.shared.errors import ConfigError, DataError
from rlpipe.shared.sample import Prompt


@dataclass(frozen=True)
class GraderSpec:
    """A grader and its options."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)


class GraderChooser:
    """Checks at its construction that every grader that can be named by the configuration exists and takes its options.

    Raises ConfigError otherwise. A column can name only those, and registered graders without options.
    """

    def __init__(self, config: RewardConfig, datasets: Sequence[DatasetConfig]) -> None:
        self._column = config.column
        self._named = {name: GraderSpec(entry.name, entry.options) for name, entry in config.graders.items()}
        for name, spec in self._named.items():
            _check(spec, f"reward.graders.{name}")
        self._default = self._find(config.name, config.options, "reward")
        self._of_dataset = {
            dataset.name: self._find(dataset.reward, {}, f"data set {dataset.name!r}")
            for dataset in datasets
            if dataset.reward
        }

    def choose(self, prompt: Prompt) -> GraderSpec:
        """The grader of `prompt`. Raises DataError if its column names an unknown one."""
        name = str(prompt.metadata.get(self._column) or "") if self._column else ""
        if not name:
            return self._of_dataset.get(prompt.dataset, self._default)
        if name in self._named:
            return self._named[name]
        if name in GRADERS:  # and no dotted path: data do not choose what code runs
            return GraderSpec(name)
        raise DataError(
            f"prompt {prompt.prompt_id}: column {self._column!r} names the grader {name!r}: neither registered "
            f"({', '.join(sorted(GRADERS))}) nor an entry of reward.graders"
        )

    def _find(self, name: str, options: Mapping[str, object], place: str) -> GraderSpec:
        if name in self._named:
            if options:
                raise ConfigError(
                    f"{place}: options {dict(options)!r} beside the grader {name!r}, which is an entry of "
                    "reward.graders: give the options there"
                )
            return self._named[name]
        spec = GraderSpec(name, options)
        _check(spec, place)
        return spec


def _check(spec: GraderSpec, place: str) -> None:
    try:
        check_grader(spec.name, spec.options)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
