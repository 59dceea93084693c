"""Where metrics go: always a JSON-lines file, and what the configuration adds."""

from rlpipe.tracking.tracker import Tracker
from rlpipe.tracking.trackers import open_trackers

__all__ = ["Tracker", "open_trackers"]
