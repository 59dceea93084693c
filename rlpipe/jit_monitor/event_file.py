"""A file of events, for a process that has no other way to the driver: SGLang's schedulers, children of an engine."""

import dataclasses
import json
from pathlib import Path

from rlpipe.jit_monitor.events import JitEvent
from rlpipe.shared.disk_errors import append_if_room


class EventFile:
    """One line an event. A line is written whole, so that a reader never meets half of one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def append(self, event: JitEvent) -> None:
        append_if_room(self._path, json.dumps(dataclasses.asdict(event)) + "\n")


class EventFolder:
    """Reads what the processes of one engine have written into their files since the last look."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._offsets: dict[Path, int] = {}

    def read(self, phase: str, step: int) -> tuple[JitEvent, ...]:
        """New events, as events of `step`; those without a phase of their own get `phase`."""
        events: list[JitEvent] = []
        for path in sorted(self._folder.glob(self._pattern)):
            with path.open(encoding="utf-8") as file:
                file.seek(self._offsets.get(path, 0))
                lines = file.readlines()
                self._offsets[path] = file.tell()
            for line in lines:
                event = JitEvent(**json.loads(line))
                events.append(dataclasses.replace(event, phase=event.phase or phase, step=step))
        return tuple(events)
