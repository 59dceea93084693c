"""What an agent is given, and what it may give back."""

import math
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rlpipe.shared.sample import Reward

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_CONNECT_SECONDS = 10.0
REPORTED = frozenset({"reward", "correct", "answer", "turn_rewards"})
"""What a report may hold that is a mapping."""


class AgentFailure(Exception):
    """An agent raised an error, ended with one, or answered something that is no reward. It costs its episode."""


@dataclass(frozen=True)
class AgentTask:
    """One episode: where the policy is served, and what is to be done.

    base_url, api_key, model: for an OpenAI client. prompt: the prompt column of the row, a text or a list of messages;
    metadata: its other columns. seed: for random choices of the agent; the same whenever this episode is made anew.
    """

    base_url: str
    api_key: str
    model: str
    prompt: Any
    label: str
    metadata: Mapping[str, Any]
    episode_id: str
    seed: int

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as messages."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)

    def client(self) -> "AsyncOpenAI":
        """An OpenAI client of this endpoint. Making one by hand loads certificates, which takes a tenth of a second."""
        import httpx
        from openai import AsyncOpenAI

        times = httpx.Timeout(
            None, connect=_CONNECT_SECONDS
        )  # a response may wait for engines until the agent's own end
        connections = httpx.AsyncClient(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), timeout=times)
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=connections)

    def as_json(self) -> dict[str, Any]:
        """What a command finds on its standard input: all but the endpoint."""
        return {key: value for key, value in asdict(self).items() if key not in ("base_url", "api_key")}


@dataclass(frozen=True)
class Report:
    """What an agent gave back. `answer` is graded in place of the policy's last message; a `reward` is not graded.

    `turn_rewards`: of single responses, by the ids of their answers; they come on top of `reward`.
    """

    reward: Reward | None = None
    answer: str | None = None
    turn_rewards: Mapping[str, float] = field(default_factory=dict)


def report_of(value: Any) -> Report:
    """A number or Reward is the reward, a text the answer; a mapping may hold what `REPORTED` lists, where the episode
    earns `turn_rewards` on top of `reward`.

    Raises AgentFailure for anything else but None.
    """
    match value:
        case None:
            return Report()
        case str():
            return Report(answer=value)
        case Reward():
            return Report(_checked(value))
        case bool():
            return Report(Reward(float(value), value, "reported by the agent"))
        case int() | float():
            return Report(_checked(Reward(float(value), None, "reported by the agent")))
        case Mapping():
            return _report_of_mapping(value)
    raise AgentFailure(f"the agent returned a {type(value).__name__}: return None, a reward, a text or a mapping")


def _report_of_mapping(value: Mapping[str, Any]) -> Report:
    unknown = sorted(map(str, value.keys() - REPORTED))
    if unknown:
        raise AgentFailure(f"the agent's report has {', '.join(unknown)}: it may have {', '.join(sorted(REPORTED))}")
    score, correct, answer = value.get("reward"), value.get("correct"), value.get("answer")
    turns = _turn_rewards(value.get("turn_rewards") or {})
    if not isinstance(correct, bool | None) or not isinstance(answer, str | None):
        raise AgentFailure("in the agent's report, correct is true or false, and answer is a text")
    if score is None and not turns:
        return Report(answer=answer)
    own = 0.0 if score is None else _number(score, "reward")
    return Report(Reward(own, correct, "reported by the agent"), answer, turns)


def _turn_rewards(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(isinstance(answer_id, str) for answer_id in value):
        raise AgentFailure("in the agent's report, turn_rewards are numbers by the ids of the policy's answers")
    return {answer_id: _number(reward, f"turn_rewards[{answer_id!r}]") for answer_id, reward in value.items()}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AgentFailure(f"the agent's {name} is {value!r}: give a finite number")
    return float(value)


def _checked(reward: Reward) -> Reward:
    if not math.isfinite(reward.score):
        raise AgentFailure(f"the agent's reward is {reward.score}: give a finite number")
    return reward
