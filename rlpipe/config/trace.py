"""Timelines of single iterations."""

from pydantic import Field, PositiveInt

from rlpipe.config.base import Section


class TraceConfig(Section):
    """A file `traces/iteration_*.json` in the run folder for Perfetto: driver, engines and actor processes together."""

    iterations: list[PositiveInt] = Field(default_factory=list)
    """Iterations of which a timeline is written."""
