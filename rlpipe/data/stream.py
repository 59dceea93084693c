"""The order of training prompts: shuffled anew in each epoch, resumable at any position."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


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
        self._order = self._order_of(state.epoch)

    def take(self, count: int) -> list[Item]:
        """The next `count` prompts; an epoch ends only when all its prompts are taken."""
        taken: list[Item] = []
        while len(taken) < count:
            rest = self._order[self.state.position : self.state.position + count - len(taken)]
            taken.extend(self._prompts[index] for index in rest)
            self._advance(len(rest))
        return taken

    @property
    def number(self) -> int:
        """How many items were taken since the beginning of the first epoch."""
        return self.state.epoch * len(self._prompts) + self.state.position

    def item(self, number: int) -> Item:
        """The item that was, or will be, taken after `number` others."""
        epoch, position = divmod(number, len(self._prompts))
        order = self._order if epoch == self.state.epoch else self._order_of(epoch)
        return self._prompts[order[position]]

    def _advance(self, count: int) -> None:
        position = self.state.position + count
        if position < len(self._order):
            self.state = StreamState(self.state.epoch, position)
            return
        self.state = StreamState(self.state.epoch + 1, 0)
        self._order = self._order_of(self.state.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"prompt order {self._seed} {epoch}").shuffle(order)
        return order
