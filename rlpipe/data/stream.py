"""The order of training prompts: shuffled anew in each epoch, resumable at any position."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
_KEPT_ORDERS = 2


@dataclass(frozen=True)
class StreamState:
    """How far the stream is: `position` prompts of `epoch` are taken."""

    epoch: int = 0
    position: int = 0


class PromptStream(Generic[Item]):
    """Endless prompts, or other items.

    The order of an epoch depends on the seed and the epoch alone, so a state is two integers.
    """

    def __init__(self, prompts: Sequence[Item], seed: int, shuffle: bool, state: StreamState = StreamState()) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self.state = state
        self._orders: dict[int, NDArray[np.int64]] = {}

    def take(self, count: int) -> list[Item]:
        """The next `count` prompts; an epoch ends only when all its prompts are taken."""
        taken: list[Item] = []
        while len(taken) < count:
            order = self._order_of(self.state.epoch)
            rest = order[self.state.position : self.state.position + count - len(taken)]
            taken.extend(self._prompts[int(index)] for index in rest)
            self._advance(len(rest))
        return taken

    @property
    def number(self) -> int:
        """How many items were taken since the beginning of the first epoch."""
        return self.state.epoch * len(self._prompts) + self.state.position

    def item(self, number: int) -> Item:
        """The item that was, or will be, taken after `number` others."""
        epoch, position = divmod(number, len(self._prompts))
        return self._prompts[int(self._order_of(epoch)[position])]

    def _advance(self, count: int) -> None:
        position = self.state.position + count
        ended = position == len(self._prompts)
        self.state = StreamState(self.state.epoch + 1, 0) if ended else StreamState(self.state.epoch, position)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        """Kept for the last epochs that were asked for: a long one takes a second to shuffle."""
        if epoch not in self._orders:
            order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"prompt order {self._seed} {epoch}").shuffle(order)
            while len(self._orders) >= _KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = np.array(order, dtype=np.int64)
        return self._orders[epoch]
