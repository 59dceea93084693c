"""Gymnasium-style text environments: `reset(seed=)` and `step(action)` with texts, as TextWorld or ALFWorld have them.

An observation that is no text is written by `observe` (`package.module:function`), and what the policy wrote becomes an
action by `act`; by default observations are turned into text as they print, and actions are the policy's text, or its
number where the action space is discrete.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rlpipe.environments.bounded import in_thread
from rlpipe.environments.protocol import Action, Observation, Result, Step, Task, Unattended, shown
from rlpipe.environments.tools import clean_text
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import named_function

_PLACE = "environment 'gymnasium'"
_LONGEST_CHARACTERS = 2**16


class GymnasiumText(Unattended):
    """`make` is a registered id of gymnasium, or `package.module:function`; `arguments` are its keyword arguments.

    The seed of a reset is the row's column `seed` where there is one, else the task's. `invalid_reward` is given for a
    turn that is no action; the observation is then shown again. `success_reward`: an episode whose rewards reach it is
    a success; without it the environment's `info["success"]` or `info["won"]` is.
    """

    def __init__(
        self,
        make: str,
        arguments: Mapping[str, Any] = {},
        observe: str | None = None,
        act: str | None = None,
        invalid_reward: float = 0.0,
        success_reward: float | None = None,
    ) -> None:
        self._make = _maker(make)
        self._arguments = dict(arguments)
        self._observe: Callable[[Any], str] = named_function(observe, {}, f"{_PLACE} observe") if observe else str
        self._act: Callable[..., Any] = named_function(act, {}, f"{_PLACE} act") if act else plain_action
        self._invalid_reward = invalid_reward
        self._success_reward = success_reward
        self._environment: Any = None
        self._last = ""
        self._total = 0.0
        self._turns = self._invalid = 0
        self._info: Mapping[str, Any] = {}
        self._truncated = False

    async def reset(self, task: Task) -> Observation:
        seed = int(task.columns.get("seed", task.seed % 2**31))
        observation, self._info = await in_thread(lambda: self._opened(seed), "gymnasium-reset")
        self._last = self._text(observation)
        return shown(self._last)

    async def step(self, action: Action, toolbox: object) -> Step:
        self._turns += 1
        try:
            chosen = self._act(action.text, self._environment)
        except ValueError as error:
            self._invalid += 1
            return Step(shown(f"{error}\n{self._last}"), self._invalid_reward)
        answer = await in_thread(lambda: self._environment.step(chosen), "gymnasium-step")
        observation, reward, terminated, self._truncated, self._info = answer
        self._total += float(reward)
        self._last = self._text(observation)
        over = terminated or self._truncated
        return Step(None if over else shown(self._last), float(reward))

    async def result(self) -> Result:
        if self._success_reward is not None:
            success: bool | None = self._total >= self._success_reward
        else:
            told = self._info.get("success", self._info.get("won"))
            success = None if told is None else bool(told)
        return Result(None, success, {"steps": self._turns, "invalid": self._invalid, "cut": self._truncated})

    async def close(self) -> None:
        if self._environment is not None:
            await in_thread(self._environment.close, "gymnasium-close")

    def _opened(self, seed: int) -> Any:
        self._environment = self._make(**self._arguments)
        return self._environment.reset(seed=seed)

    def _text(self, observation: Any) -> str:
        return clean_text(self._observe(observation), _LONGEST_CHARACTERS)


def plain_action(text: str, environment: Any) -> Any:
    """The text itself, or its number where actions are numbered. Raises ValueError for what is no action."""
    space: Any = getattr(environment, "action_space", None)
    if not hasattr(space, "n"):
        return text.strip()
    start = int(getattr(space, "start", 0))
    if not text.strip().isdigit() or not start <= int(text) < start + int(space.n):
        raise ValueError(f"an action is a number from {start} to {start + int(space.n) - 1}")
    return int(text)


def _maker(make: str) -> Callable[..., Any]:
    if ":" in make:
        made: Callable[..., Any] = named_function(make, {}, f"{_PLACE} make")
        return made
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(f"{_PLACE} make {make!r} needs the package gymnasium: install rlpipe[agents]") from None
    if make not in gymnasium.registry:
        raise ConfigError(
            f"{_PLACE} make {make!r} is not registered: import what registers it, or give module:function"
        )
    return lambda **arguments: gymnasium.make(make, **arguments)
