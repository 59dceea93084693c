"""`rlpipe env check`: an environment is tried on rows of its data without a model, and told about."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import rewards
from rlpipe.commands.replay_episode import episode_lines
from rlpipe.config.environment import EnvironmentConfig
from rlpipe.config.root import Config
from rlpipe.environments.episode import EnvironmentFailure, environment_function, first_tools
from rlpipe.environments.stand_in_policy import StandInPolicy
from rlpipe.generation.conversation import Conversation
from rlpipe.generation.event_loop import BackgroundLoop
from rlpipe.generation.inputs import Inputs, load_inputs
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.monitoring.transcripts import transcript
from rlpipe.shared.errors import ConfigError, DataError
from rlpipe.shared.sample import Episode
from rollout.requests import SamplingParameters


@dataclass(frozen=True)
class Tried:
    """An episode and how long it took, or why there is none."""

    episode: Episode
    seconds: float
    problem: str = ""


def check_environment(config: Config, episodes: int, texts: Sequence[str]) -> Iterator[str]:
    """Lines about `episodes` episodes on the first rows of the training data; each begins with turns of `texts`.

    The first episode is told whole. Raises ConfigError where the configuration names no environment, and DataError,
    after everything is told, where an episode failed.
    """
    settings = config.rollout.generate.environment
    if settings is None:
        raise ConfigError("rollout.generate.environment is empty, so there is nothing to try: name an environment")
    for text in texts:
        if text != text.encode(errors="replace").decode():
            raise ConfigError(f"--say {ascii(text)[:100]} is not text in UTF-8; correct it")
    inputs = load_inputs(config)
    with closing(BackgroundLoop("environment")) as loop:  # which leaves behind what hangs
        try:
            yield from loop.submit(_tools(settings, inputs)).result()
        except EnvironmentFailure as failure:
            raise DataError(f"the environment {settings.name!r} fails at once: {failure}") from failure
        tried = loop.submit(_played(settings, inputs, episodes, texts)).result()
    whole = [one for one in tried if not one.problem]
    if whole:
        row = transcript(whole[0].episode, lambda ids: str(inputs.tokenizer.decode(list(ids))))
        yield from episode_lines(row)
        yield ""
    for number, one in enumerate(tried):
        yield f"episode {number}: {one.problem or _summary(one)}"
    if len(whole) < len(tried):
        raise DataError(f"{len(tried) - len(whole)} of {len(tried)} episodes failed; the reasons stand above")


async def _tools(settings: EnvironmentConfig, inputs: Inputs) -> list[str]:
    tools = await first_tools(settings, inputs.training.prompts[0])
    return [f"tool {tool.name}: {tool.description.splitlines()[0] if tool.description else ''}" for tool in tools] or [
        "no tools"
    ]


async def _played(settings: EnvironmentConfig, inputs: Inputs, count: int, texts: Sequence[str]) -> list[Tried]:
    play = environment_function(settings, inputs.config.data.max_prompt_tokens)
    tried = []
    for number in range(count):
        prompt = inputs.training.prompts[number % len(inputs.training.prompts)]
        begin = time.perf_counter()
        try:
            tools = await first_tools(settings, prompt)
            policy = StandInPolicy(inputs.tokenizer, texts, tools, settings.tool_format, seed=number)
            sampling = SamplingParameters(inputs.config.rollout.max_response_tokens)
            request = PromptRequest(f"check-{number:03d}", f"check-{number:03d}", prompt, sampling)
            conversation = Conversation(request, policy, inputs.tokenizer, inputs.config.seed)
            await play(conversation)
            tried.append(Tried(conversation.episode(), time.perf_counter() - begin))
        except EnvironmentFailure as failure:
            tried.append(Tried((), time.perf_counter() - begin, f"FAILED: {failure}"))
    return tried


def _summary(tried: Tried) -> str:
    outcome = tried.episode[0].outcome
    assert outcome is not None
    reward = rewards.grade("environment", "", "", environment=rewards.facts_of(tried.episode[0])["environment"])
    uses = [use for sample in tried.episode for turn in sample.turns for use in turn.tools]
    failed = sum(bool(use.failure) for use in uses)
    return (
        f"{outcome.turns} turns in {tried.seconds:.2f} s, ended by {outcome.ended}, reward {reward.score:.4g}, success "
        f"{outcome.success}, {len(uses)} tool calls of which {failed} failed"
        + (", CLEANUP FAILED" if outcome.cleanup_failed else "")
    )
