"""Where metrics go: always a JSON-lines file, and what the configuration adds."""

from rlpipe.tracking.trackers import Tracker, open_trackers

__all__ = ["Tracker", "open_trackers"]
