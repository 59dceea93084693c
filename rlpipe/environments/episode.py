"""The generate function `environment`: one episode, turn by turn, within its limits and cleaned up whatever happens."""

import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from rlpipe.config.environment import EnvironmentConfig
from rlpipe.config.root import Config
from rlpipe.environments.bounded import in_thread, within
from rlpipe.environments.environment_registry import environment_maker
from rlpipe.environments.observed_tokens import ObservedTokens
from rlpipe.environments.protocol import Action, Environment, Observation, Result, Step, Task
from rlpipe.environments.tool_calls import tool_calls
from rlpipe.environments.tools import Tool, ToolBox, ToolPlaces
from rlpipe.generation.conversation import Conversation
from rlpipe.generation.episode_makers import ConversationMaker
from rlpipe.generation.generate_functions import GenerateFunction
from rlpipe.generation.stop_strings import before_stop
from rlpipe.shared.errors import DataError, RlpipeError
from rlpipe.shared.sample import Prompt, Status
from rlpipe.shared.turn import Ended, Outcome

Answer = TypeVar("Answer")

_CHARACTERS_PER_TOKEN = 64  # longer than any token; what cannot fit is cut before it is tokenized


class EnvironmentFailure(Exception):
    """An environment did what it must not. It costs its episode, is counted and told."""


class EnvironmentEpisodes(ConversationMaker):
    """Episodes of the environment that a configuration names. Raises ConfigError for one that cannot be made."""

    def __init__(self, config: Config) -> None:
        environment = config.rollout.generate.environment
        assert environment is not None
        data = config.data
        super().__init__(environment_function(environment, data.max_prompt_tokens, data.chat_template_arguments))


def environment_function(
    config: EnvironmentConfig, max_prompt_tokens: int, template_arguments: Mapping[str, Any] = MappingProxyType({})
) -> GenerateFunction:
    """The generate function of an environment. template_arguments: what the chat template is given beside messages and
    tools. Raises ConfigError for one that cannot be made."""
    make, places = environment_maker(config), ToolPlaces(config)
    formats: list[ObservedTokens] = []

    async def environment(conversation: Conversation) -> None:
        if not formats:
            most_characters = (max_prompt_tokens + conversation.remaining_tokens) * _CHARACTERS_PER_TOKEN
            formats.append(ObservedTokens(conversation.tokenizer, config.format, most_characters, template_arguments))
        await Episode(config, make, places, formats[0], max_prompt_tokens).run(conversation)

    return environment


class Episode:
    """One episode under way. `run` returns when it is over; what it came to stands in the conversation."""

    def __init__(
        self,
        config: EnvironmentConfig,
        make: Callable[[], Environment],
        places: ToolPlaces,
        tokens: ObservedTokens,
        max_prompt_tokens: int,
    ) -> None:
        self._config = config
        self._make = make
        self._tokens = tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._toolbox = ToolBox(places, tokens.has_special_text)
        self._sequences: dict[str, Conversation] = {}
        self._taken = 0
        self._start = time.monotonic()

    async def run(self, conversation: Conversation) -> None:
        """Raises EnvironmentFailure for what the environment must not do, and InterruptedResponse."""
        environment, observation = await self._opened(conversation)
        cleanup_failed = False
        try:
            ended = await self._turns(environment, observation, conversation)
            result = await self._bounded("result", environment.result())
        finally:
            cleanup_failed = not await self._closed(environment)
        if not isinstance(result, Result):
            raise EnvironmentFailure(f"its result is a {type(result).__name__}, not a Result")
        taken = [turn for sequence in self._sequences.values() for turn in sequence.turns]
        conversation.outcome = Outcome(
            turns=len(taken),
            turn_rewards=sum(turn.reward or 0.0 for turn in taken),
            reward=result.reward,
            success=result.success,
            state=dict(result.state),
            ended=ended,
            cleanup_failed=cleanup_failed,
        )
        for sequence in self._sequences.values():
            if ended != "done" and sequence.status is None:
                sequence.status = Status.TRUNCATED

    async def _opened(self, conversation: Conversation) -> tuple[Environment, Observation]:
        """A fresh environment with its first observation; tried again where a reset fails."""
        task = _task(conversation.prompt, conversation.group_seed)
        for attempt in range(self._config.reset_retries + 1):
            environment = await self._bounded("making", in_thread(self._make, "environment-making"))
            try:
                return environment, await self._bounded("reset", environment.reset(task))
            except EnvironmentFailure:
                await self._closed(environment)
                if attempt == self._config.reset_retries:
                    raise
            except BaseException:
                await self._closed(environment)
                raise
        raise AssertionError("a loop that returns or raises")

    async def _turns(self, environment: Environment, observation: Observation, first: Conversation) -> Ended:
        """Takes turns until something ends the episode, and says what did."""
        while True:
            if self._taken == self._config.max_turns:
                return "turns"
            if time.monotonic() - self._start > self._config.episode_seconds:
                return "seconds"
            sequence = self._sequence(environment, observation, first)
            if sequence.finished:
                return "tokens"
            step = await self._turn(environment, observation.agent, sequence)
            if step.observation is None:
                return "done"
            if sequence.finished and step.observation.agent == observation.agent:
                return "tokens"
            observation = step.observation

    def _sequence(self, environment: Environment, observation: Observation, first: Conversation) -> Conversation:
        """The tokens of the agent that acts next, with what it is shown."""
        sequence = self._sequences.get(observation.agent)
        if sequence is None:
            sequence = first.beside(observation.agent) if self._sequences else first
            self._sequences[observation.agent] = sequence
            if opening := self._written(self._tokens.opening, observation, environment.tools):
                text, token_ids = opening
                if len(token_ids) > self._max_prompt_tokens:
                    raise EnvironmentFailure(
                        f"its first messages are {len(token_ids)} tokens, more than data.max_prompt_tokens = "
                        f"{self._max_prompt_tokens}"
                    )
                sequence.replace_prompt(text, token_ids)
                return sequence
        if not sequence.finished:
            sequence.insert_tokens(self._written(self._tokens.following, observation, sequence.last_token))
        return sequence

    async def _turn(self, environment: Environment, agent: str, sequence: Conversation) -> Step:
        stop = tuple(self._config.stop)
        if self._config.tool_format == "brackets" and environment.tools:
            stop += (">>",)
        text = await sequence.write(stop, most_tokens=self._config.max_turn_tokens, final=False)
        begin = time.monotonic()
        cut = sequence.last_token != sequence.tokenizer.eos_token_id and before_stop(text, stop)[1] is None
        calls = tool_calls(text, self._config.tool_format, environment.tools)
        action = Action(text, sequence.last_turn_ids, calls, agent, cut)
        step = await self._bounded("step", environment.step(action, self._toolbox))
        if not isinstance(step, Step):
            raise EnvironmentFailure(f"its step is a {type(step).__name__}, not a Step")
        sequence.describe_turn(
            number=self._taken,
            agent=agent,
            reward=step.reward,
            tool_seconds=time.monotonic() - begin,
            tools=self._toolbox.take_uses(),
        )
        self._taken += 1
        for other, reward in step.rewards.items():
            if other not in self._sequences or not self._sequences[other].turns:
                raise EnvironmentFailure(f"its step rewards the agent {other!r}, which has not acted")
            self._sequences[other].describe_turn(reward=reward)
        return step

    def _written(self, write: Callable[..., Answer], *observed: object) -> Answer:
        try:
            return write(*observed)
        except DataError as error:  # a chat template that refuses a message
            raise EnvironmentFailure(f"its observation cannot be written: {error}") from error

    async def _bounded(self, what: str, work: Awaitable[Answer]) -> Answer:
        return await bounded(what, work, self._config.step_seconds)

    async def _closed(self, environment: Environment) -> bool:
        """Whether the environment gave back what it held, within its time."""
        try:
            await within(self._config.step_seconds, environment.close())
        except Exception:  # the episode is over, and as good as before; the failure is counted
            return False
        return True


async def first_tools(config: EnvironmentConfig, prompt: Prompt) -> tuple[Tool, ...]:
    """The tools that the policy has at the first turn of an episode on `prompt`. Raises EnvironmentFailure."""
    environment = environment_maker(config)()
    try:
        await bounded("reset", environment.reset(_task(prompt, 0)), config.step_seconds)
        return tuple(environment.tools)
    finally:
        await bounded("cleanup", environment.close(), config.step_seconds)


def _task(prompt: Prompt, seed: int) -> Task:
    return Task(prompt.prompt_id, prompt.text, prompt.label, prompt.metadata, seed)


async def bounded(what: str, work: Awaitable[Answer], seconds: float) -> Answer:
    """What an environment answers. Raises EnvironmentFailure where it fails or is late, and RlpipeError as it is."""
    try:
        return await within(seconds, work)
    except TimeoutError:
        raise EnvironmentFailure(f"its {what} took longer than {seconds:g} seconds") from None
    except RlpipeError:
        raise
    except Exception as error:  # an environment is someone else's program, and may raise anything
        raise EnvironmentFailure(f"its {what} failed: {type(error).__name__}: {error}") from error
