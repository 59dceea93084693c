"""The trackers of a run."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from rlpipe.config.root import Config
from rlpipe.monitoring.json_lines import append_json_line, drop_rows_from
from rlpipe.monitoring.metric_dictionary import check_names
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.tracker import SampleRow, Tracker


class JsonLines:
    """`metrics.jsonl`, one object an iteration, and `samples.jsonl`, one object a sample."""

    def __init__(self, directory: RunDirectory, first_iteration: int) -> None:
        self._directory = directory
        self.notes = [
            note for path in (directory.metrics, directory.samples) for note in drop_rows_from(path, first_iteration)
        ]

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        append_json_line(self._directory.metrics, {"iteration": iteration, **metrics})

    def log_samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        for row in rows:
            append_json_line(self._directory.samples, {"iteration": iteration, **row})

    def close(self, failed: bool) -> None:
        """Every row is on disk already."""


class Trackers(AbstractContextManager["Trackers"]):
    """All trackers of a run as one. A metric that is not in the dictionary is an error. `notes` are for the user."""

    def __init__(self, trackers: list[Tracker], notes: Sequence[str] = ()) -> None:
        self._trackers = trackers
        self.notes = tuple(notes)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        check_names(metrics)
        for tracker in self._trackers:
            tracker.log(iteration, metrics)

    def log_samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        for tracker in self._trackers:
            tracker.log_samples(iteration, rows)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        for tracker in self._trackers:
            tracker.close(failed=error_type is not None)


def open_trackers(config: Config, directory: RunDirectory, first_iteration: int) -> Trackers:
    """Trackers of `config`; rows of `first_iteration` and later that an earlier run left are removed."""
    lines = JsonLines(directory, first_iteration)
    trackers: list[Tracker] = [lines]
    if config.trackers.tensorboard:
        from rlpipe.monitoring.tensorboard import TensorBoard

        trackers.append(TensorBoard(directory, first_iteration))
    if config.trackers.wandb != "off":
        from rlpipe.monitoring.wandb import WeightsAndBiases

        trackers.append(WeightsAndBiases(config, directory))
    return Trackers(trackers, lines.notes)
