"""From an engine's answer to a Sample."""

from rlpipe.errors import RolloutError
from rlpipe.sample import Prompt, Sample
from rollout.requests import Generation


def to_sample(prompt: Prompt, group_id: str, generation: Generation, response_text: str) -> Sample:
    """The sample of `generation`; its id is the request's.

    Raises RolloutError when an engine answered a different number of log-probabilities than of tokens.
    """
    tokens = len(generation.token_ids)
    if len(generation.logprobs) != tokens:
        raise RolloutError(
            f"engine {generation.engine} answered {tokens} tokens and {len(generation.logprobs)} log-probabilities "
            f"for request {generation.request_id!r}; they must be as many"
        )
    return Sample(
        sample_id=generation.request_id,
        group_id=group_id,
        prompt=prompt,
        response_ids=generation.token_ids,
        response_text=response_text,
        rollout_logprobs=generation.logprobs,
        loss_mask=(1,) * tokens,
        versions=generation.versions,
        status=generation.status,
        engine=generation.engine,
        metadata={"generate_seconds": generation.seconds, "retractions": generation.retractions},
    )
