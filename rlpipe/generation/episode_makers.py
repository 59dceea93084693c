"""What makes episodes: a generate function with a conversation, or a room above this one with means of its own."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from rlpipe.config.root import Config
from rlpipe.generation.conversation import Conversation, Generator, InterruptedResponse
from rlpipe.generation.generate_functions import GenerateFunction, generate_function
from rlpipe.generation.group_source import Responded
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.shared.named_function import named_function
from rollout.partial_response import PartialResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EpisodeMaker(Protocol):
    """Makes an episode of each request while it is open; `make` is called in one event loop. It may be opened again."""

    def open(self, engines: Generator, tokenizer: "PreTrainedTokenizerBase", run_seed: int) -> None:
        """Starts what episodes need. Called outside of the loop."""

    async def make(self, request: PromptRequest, partial: PartialResponse) -> Responded:
        """The episode, ungraded or graded. Any error but RlpipeError costs the episode, and is counted and told.

        partial: what `Responded` gave when the same request was interrupted; empty where it begins.
        """

    async def interrupt(self, abort: Callable[[], Awaitable[None]]) -> None:
        """Has the engines abort, and running episodes end as interrupted."""

    def take_notes(self) -> list[str]:
        """What the user should know of episodes, since the last call. From any thread."""

    def take_metrics(self) -> dict[str, float]:
        """By their names in the metric dictionary, since the last call. From any thread."""

    def close(self) -> None:
        """Ends what was started; no request is made any more, and the loop still runs."""


class ConversationMaker:
    """Hands a conversation to a generate function."""

    def __init__(self, function: GenerateFunction) -> None:
        self._function = function

    def open(self, engines: Generator, tokenizer: "PreTrainedTokenizerBase", run_seed: int) -> None:
        self._engines, self._tokenizer, self._run_seed = engines, tokenizer, run_seed

    async def make(self, request: PromptRequest, partial: PartialResponse) -> Responded:
        conversation = Conversation(request, self._engines, self._tokenizer, self._run_seed, partial)
        try:
            await self._function(conversation)
        except InterruptedResponse:
            return Responded(None, conversation.partial)
        return Responded(conversation.episode())

    async def interrupt(self, abort: Callable[[], Awaitable[None]]) -> None:
        await abort()

    def take_notes(self) -> list[str]:
        return []

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return


MAKERS: Mapping[str, str] = {
    "agent": "rlpipe.agents.agent_maker:AgentMaker",
    "environment": "rlpipe.environments.episode:EnvironmentEpisodes",
}
"""Functions of `rollout.generate` that are rooms above this one: what makes an EpisodeMaker of the configuration."""


def episode_maker(config: Config) -> EpisodeMaker:
    """What `rollout.generate` names. Raises ConfigError for what cannot work."""
    settings = config.rollout.generate
    if settings.function in MAKERS:
        maker: EpisodeMaker = named_function(settings.function, MAKERS, "rollout.generate.function")(config)
        return maker
    return ConversationMaker(generate_function(settings, MAKERS))
