"""The listener that times exchanges: on a CPU a wait blocks; on a GPU it makes the compute stream wait, which marks in
that stream measure."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from actor.collectives.interception import Method
from actor.collectives.operations import END_OF_BATCH, WAIT
from actor.rank_clock import RankClock

FirstUse = Callable[[str, str], AbstractContextManager[None]]


class ExchangeTimer:
    """Exchanges count in `clock`. `first_use(group, operation)` is entered around the first start of each kind in a
    group, which sets up the communicator."""

    def __init__(self, clock: RankClock, first_use: FirstUse | None = None) -> None:
        self._exchange = clock.exchange
        self._first_use = first_use

    def around(self, operation: str, call: Method) -> Method:
        if operation in (WAIT, END_OF_BATCH) or self._first_use is None:
            return self._timed(call)
        return self._timed_start(operation, call, self._first_use)

    def _timed(self, call: Method) -> Method:
        exchange = self._exchange

        def timed(*arguments: Any, **keywords: Any) -> Any:
            with exchange:
                return call(*arguments, **keywords)

        return timed

    def _timed_start(self, operation: str, call: Method, first_use: FirstUse) -> Method:
        """It runs thousands of times in a step."""
        exchange = self._exchange
        used: set[str] = set()

        def timed(group: Any, *arguments: Any, **keywords: Any) -> Any:
            name = group.group_desc or group.group_name
            with exchange:
                if name in used:
                    return call(group, *arguments, **keywords)
                used.add(name)
                with first_use(name, operation):
                    return call(group, *arguments, **keywords)

        return timed
