"""The trackers of a run."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict

from rlpipe.config.root import Config
from rlpipe.monitoring.json_lines import append_json_line, drop_rows_from
from rlpipe.monitoring.metric_dictionary import check_names
from rlpipe.monitoring.response_record import ResponseRecord
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.tracker import SampleRow, Tracker
from rlpipe.monitoring.transcripts import Transcript


class JsonLines:
    """`metrics.jsonl` and `responses.jsonl`, one object an iteration, `samples.jsonl`, one a sample, and
    `episodes.jsonl`, one an episode."""

    def __init__(self, directory: RunDirectory, first_iteration: int) -> None:
        self._directory = directory
        files = (directory.metrics, directory.samples, directory.episodes, directory.responses)
        self.notes = [note for path in files for note in drop_rows_from(path, first_iteration)]

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        append_json_line(self._directory.metrics, {"iteration": iteration, **metrics})

    def log_samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        for row in rows:
            append_json_line(self._directory.samples, {"iteration": iteration, **row})

    def log_episodes(self, iteration: int, transcripts: Sequence[Transcript]) -> None:
        for row in transcripts:
            append_json_line(self._directory.episodes, {"iteration": iteration, **row})

    def log_responses(self, iteration: int, record: ResponseRecord) -> None:
        append_json_line(self._directory.responses, {"iteration": iteration, **asdict(record)})

    def close(self, failed: bool) -> None:
        """Every row is on disk already."""


class Trackers(AbstractContextManager["Trackers"]):
    """All trackers of a run as one. A metric that is not in the dictionary is an error. `notes` are for the user."""

    def __init__(self, trackers: list[Tracker], notes: Sequence[str] = (), lines: JsonLines | None = None) -> None:
        self._trackers = trackers
        self._lines = lines
        self.notes = tuple(notes)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        check_names(metrics)
        for tracker in self._trackers:
            tracker.log(iteration, metrics)

    def log_samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        for tracker in self._trackers:
            tracker.log_samples(iteration, rows)

    def log_episodes(self, iteration: int, transcripts: Sequence[Transcript]) -> None:
        """Only the run's folder keeps them."""
        if self._lines is not None:
            self._lines.log_episodes(iteration, transcripts)

    def log_responses(self, iteration: int, record: ResponseRecord | None) -> None:
        """Likewise, where there is a record."""
        if self._lines is not None and record is not None:
            self._lines.log_responses(iteration, record)

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
    notes = list(lines.notes)
    if config.trackers.prometheus_port is not None:
        from rlpipe.monitoring.prometheus import Prometheus

        prometheus = Prometheus(config.trackers, config.run.name, directory)
        trackers.append(prometheus)
        notes.append(prometheus.note)
    return Trackers(trackers, notes, lines)
