"""A text game of many turns: walk over a square board to the goal, one letter a turn.

The policy is shown where it stands and where the goal is (`24>30`: column 2, row 4, goal in column 3, row 0) and
writes one of `n`, `e`, `s`, `w`. A step towards the goal earns `step_reward`, one away from it, into a wall or anything
else loses as much: every turn teaches, from the first iteration of a policy that knows nothing.
"""

import random
from collections.abc import Iterator
from typing import Any

from rlpipe.environments.protocol import Action, Observation, Result, Step, Task, Unattended, shown
from rlpipe.shared.errors import ConfigError

Place = tuple[int, int]
_MOVES: dict[str, Place] = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}
_LARGEST = 10  # one digit for each coordinate


class Grid(Unattended):
    """One game. Its tasks are pairs of places; held-out pairs occur in no training task."""

    def __init__(self, size: int = 5, step_reward: float = 0.1, goal_reward: float = 1.0) -> None:
        if not 2 <= size <= _LARGEST:
            raise ConfigError(f"environment 'grid': size is {size}, and must be 2 to {_LARGEST}")
        self._size = size
        self._step_reward = step_reward
        self._goal_reward = goal_reward
        self._place: Place = (0, 0)
        self._goal: Place = (0, 0)
        self._turns = 0
        self._shortest = 0

    def tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Up to `count` rows, in random order."""
        places = [(x, y) for x in range(self._size) for y in range(self._size)]
        pairs = [(start, goal) for start in places for goal in places if start != goal]
        random.Random(f"grid {seed}").shuffle(pairs)
        for (x, y), (goal_x, goal_y) in pairs[:count]:
            yield {
                "prompt": f"{x}{y}>{goal_x}{goal_y}",
                "label": f"{goal_x}{goal_y}",
                "task": f"{x}{y}{goal_x}{goal_y}",
            }

    async def reset(self, task: Task) -> Observation:
        x, y, goal_x, goal_y = map(int, str(task.columns["task"]))
        self._place, self._goal = (x, y), (goal_x, goal_y)
        self._shortest = self._distance()
        return Observation()

    async def step(self, action: Action, toolbox: object) -> Step:
        before = self._distance()
        move = _MOVES.get(action.text, (0, 0))
        place = self._place[0] + move[0], self._place[1] + move[1]
        if all(0 <= coordinate < self._size for coordinate in place):
            self._place = place
        self._turns += 1
        if self._place == self._goal:
            return Step(None, self._step_reward)
        reward = self._step_reward if self._distance() < before else -self._step_reward
        return Step(shown(self._view()), reward)

    async def result(self) -> Result:
        success = self._place == self._goal
        state = {"turns": self._turns, "distance": self._distance(), "detour": self._turns - self._shortest}
        return Result(self._goal_reward if success else 0.0, success, state)

    def _view(self) -> str:
        return f" {self._place[0]}{self._place[1]}>{self._goal[0]}{self._goal[1]}"

    def _distance(self) -> int:
        return sum(abs(own - goal) for own, goal in zip(self._place, self._goal, strict=True))
