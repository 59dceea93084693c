"""Writing a run's report into its folder."""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context

from rlpipe.monitoring.report.figure import draw
from rlpipe.monitoring.report.history import read_history
from rlpipe.monitoring.report.page import render
from rlpipe.shared.atomic_file import write_atomically


@dataclass(frozen=True)
class ReportFiles:
    """Where the report was written."""

    picture: Path
    page: Path


def write_report(folder: Path) -> ReportFiles:
    """Write report.png and report.html of the run in `folder`. Raises DataError when there is nothing to show."""
    history = read_history(folder)
    files = ReportFiles(folder / "report.png", folder / "report.html")
    picture = BytesIO()
    with rc_context({"text.parse_math": False}):  # a dollar sign in a name is one
        draw(history).savefig(picture, dpi=110)
    write_atomically(files.picture, picture.getvalue())
    write_atomically(files.page, render(history).encode("utf-8", errors="replace"))
    return files
