"""A generate function whose responses have drawn lengths: long-tailed over prompts, and around each prompt's own."""

import random

from rlpipe.generation.conversation import Conversation


async def write_drawn_length(conversation: Conversation, median: float = 30.0, sigma: float = 1.0) -> None:
    """With `rollout.sampling.ignore_eos`, so that every setting of generation has the same to write."""
    of_prompt = random.Random(conversation.prompt.prompt_id).lognormvariate(0.0, sigma)
    of_sample = random.Random(conversation.sample_id).lognormvariate(0.0, sigma / 3)
    length = max(1, round(median * of_prompt * of_sample))
    await conversation.write(most_tokens=min(length, conversation.remaining_tokens))
