"""What is asked of a generate function."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlpipe.sample import Prompt
from rollout.requests import SamplingParameters


@dataclass(frozen=True)
class Ask:
    """One response that is wanted. The sample id alone, with the run's seed, decides its random numbers."""

    sample_id: str
    group_id: str
    prompt: Prompt
    sampling: SamplingParameters
    urgent: bool = False


def ask_group(group_id: str, prompt: Prompt, samples: int, sampling: SamplingParameters) -> list[Ask]:
    """`samples` responses to one prompt; ids are `group_id-sample`."""
    return [Ask(f"{group_id}-{index:03d}", group_id, prompt, sampling) for index in range(samples)]


def ask_groups(prefix: str, prompts: Iterable[Prompt], samples: int, sampling: SamplingParameters) -> list[Ask]:
    """`samples` responses for each prompt, before all that wait; ids are `prefix-group-sample`, so they recur when an
    iteration is redone."""
    return [
        replace(ask, urgent=True)
        for group, prompt in enumerate(prompts)
        for ask in ask_group(f"{prefix}-{group:05d}", prompt, samples, sampling)
    ]
