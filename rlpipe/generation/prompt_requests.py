"""What is asked of a generate function."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlpipe.shared.sample import Prompt
from rollout.requests import SamplingParameters


@dataclass(frozen=True)
class PromptRequest:
    """One response that is wanted. The sample id alone, with the run's seed, decides its random numbers; those
    of later turns also depend on the tokens before them (`ResponseSeeds`).

    expected_tokens: of the response, as far as the past tells. spare: others are to be answered first.
    """

    sample_id: str
    group_id: str
    prompt: Prompt
    sampling: SamplingParameters
    urgent: bool = False
    spare: bool = False
    expected_tokens: int | None = None


def requests_for_prompt(
    group_id: str, prompt: Prompt, samples: int, sampling: SamplingParameters, expected_tokens: int | None = None
) -> list[PromptRequest]:
    """`samples` responses to one prompt; ids are `group_id-sample`."""
    return [
        PromptRequest(f"{group_id}-{index:03d}", group_id, prompt, sampling, expected_tokens=expected_tokens)
        for index in range(samples)
    ]


def requests_for_prompts(
    prefix: str, prompts: Iterable[Prompt], samples: int, sampling: SamplingParameters
) -> list[PromptRequest]:
    """`samples` responses for each prompt, before all that wait; ids are `prefix-group-sample`, so they recur when an
    iteration is redone."""
    return [
        replace(request, urgent=True)
        for group, prompt in enumerate(prompts)
        for request in requests_for_prompt(f"{prefix}-{group:05d}", prompt, samples, sampling)
    ]
