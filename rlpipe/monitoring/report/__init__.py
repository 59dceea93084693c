"""The picture of a run: PNG and a self-contained HTML page, made from its folder."""

from rlpipe.monitoring.report.make import write_report

__all__ = ["write_report"]
