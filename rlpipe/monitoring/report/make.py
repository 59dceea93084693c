"""Writing a run's report into its folder."""

from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rlpipe.monitoring.report.figure import draw
from rlpipe.monitoring.report.history import read_history
from rlpipe.monitoring.report.page import render


@dataclass(frozen=True)
class ReportFiles:
    """Where the report was written."""

    picture: Path
    page: Path


def write_report(folder: Path) -> ReportFiles:
    """Write report.png and report.html of the run in `folder`. Raises DataError when there is nothing to show."""
    history = read_history(folder)
    figure = draw(history)
    files = ReportFiles(folder / "report.png", folder / "report.html")
    figure.savefig(files.picture, dpi=110)
    svg = StringIO()
    figure.savefig(svg, format="svg")
    files.page.write_text(render(history, svg.getvalue()), encoding="utf-8")
    return files
