"""TensorBoard event files in the run folder."""

from collections.abc import Mapping, Sequence

from torch.utils.tensorboard import SummaryWriter

from rlpipe.monitoring.panels import GROUPS, name_pattern
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.tracker import SampleRow

Layout = dict[str, dict[str, tuple[str, list[str]]]]


class TensorBoard:
    """Scalars under the metrics' own names; the step is the iteration."""

    def __init__(self, directory: RunDirectory, first_iteration: int) -> None:
        # purge_step hides what an interrupted run wrote for iterations that are made again.
        self._writer = SummaryWriter(str(directory.path / "tensorboard"), purge_step=first_iteration)
        self._writer.add_custom_scalars(custom_scalars())

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def log_samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        text = "\n\n".join("\n".join(f"    {name}: {value}" for name, value in row.items()) for row in rows)
        self._writer.add_text("samples", text, iteration)

    def close(self, failed: bool) -> None:
        self._writer.close()


def custom_scalars() -> Layout:
    """The panels as a layout of the tab `Custom scalars`: what `SummaryWriter.add_custom_scalars` takes.

    TensorBoard cannot stack, so stacked panels are lines there.
    """
    return {
        group.title: {
            panel.title: ("Multiline", [name_pattern(metric) for metric in panel.metrics]) for panel in group.panels
        }
        for group in GROUPS
    }
