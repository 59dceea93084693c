"""A policy that writes whatever its seed says, in the place of engines, and remembers what it saw and wrote."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass

from rlpipe.shared.sample import Status, VersionSpan
from rollout.requests import GenerateRequest, Generation

TEXTS = (
    "Grüße, 世界 🙂",
    "a plain answer",
    " spaces around ",
    "line\nbreaks\n\n",
    "<|im_end|> as text",
    "\u200bzero",
    "{}",
)
NAMES = ("look_up", "add", "no_such_tool")


@dataclass(frozen=True)
class Written:
    """What the policy saw and wrote at once."""

    prompt_ids: tuple[int, ...]
    generation: Generation


class RandomPolicy:
    """Answers by the request's seed alone: text, also broken UTF-8, and tool calls good and bad."""

    def __init__(self, tokenizer, seconds: float = 0.0, most_tokens: int = 10**9) -> None:
        self.tokenizer, self.seconds, self.most_tokens = tokenizer, seconds, most_tokens
        self.written: list[Written] = []
        self.version = 1
        self.running = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.running += 1
        await asyncio.sleep(self.seconds)
        self.running -= 1
        token_ids, status = self.answer(request)
        numbers = random.Random(request.seed)
        logprobs = tuple(-numbers.random() * 5 for _ in token_ids)
        spans = (VersionSpan(self.version, len(token_ids)),)
        generation = Generation(request.request_id, token_ids, logprobs, status, spans, 0, self.seconds, 0)
        self.written.append(Written(request.prompt_ids, generation))
        return generation

    def answer(self, request: GenerateRequest) -> tuple[tuple[int, ...], Status]:
        numbers = random.Random(request.seed + 1)
        ids = [*self.encode(self.text(numbers)), *self.broken_text(numbers), self.tokenizer.eos_token_id]
        for stop in request.sampling.stop:
            before, found, after = self.tokenizer.decode(ids).partition(stop)
            if found:  # the token in which a stop string ends may go on after it
                ids = self.encode(before + found + after[: numbers.randrange(3)])
        limit = min(request.sampling.max_new_tokens, self.most_tokens)
        return tuple(ids[:limit]), Status.COMPLETED if len(ids) <= limit else Status.TRUNCATED

    def text(self, numbers: random.Random) -> str:
        kind = numbers.randrange(8)
        said = numbers.choice(TEXTS)
        if kind < 3:
            return said
        if kind == 3:
            return f"<think>\n{said}\n</think>\n\n{said}"
        arguments = {"text": said, "number": numbers.randint(-5, 10**6)}
        call = json.dumps({"name": NAMES[numbers.randrange(2)], "arguments": arguments}, ensure_ascii=bool(kind % 2))
        if kind == 4:
            return f"{said}<tool_call>\n{call}\n</tool_call>"
        if kind == 5:
            return f"<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>"
        if kind == 6:
            return f"<tool_call>\n{call[:-3]}\n</tool_call>"
        return f'<tool_call>\n{{"name": "{NAMES[2]}", "arguments": {{}}}}\n</tool_call>{said}'

    def broken_text(self, numbers: random.Random) -> list[int]:
        """Half a character, or nothing."""
        return self.encode("ü")[: numbers.randrange(2)]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def assert_trained_once_as_sampled(samples, written) -> None:
    """Each response stands in exactly one sample with a mask of 1, after exactly the tokens that the policy had seen
    when it wrote it, with the very log-probabilities; and nothing else is trained."""
    sequences = [sample.prompt.token_ids + sample.response_ids for sample in samples]
    trained = [[0] * sample.prompt_tokens + list(sample.loss_mask) for sample in samples]
    logprobs = [(0.0,) * sample.prompt_tokens + sample.rollout_logprobs for sample in samples]
    responses = Counter((one.prompt_ids, one.generation.token_ids, one.generation.logprobs) for one in written)
    for (prompt_ids, token_ids, values), times in responses.items():
        start, end = len(prompt_ids), len(prompt_ids) + len(token_ids)
        places = [
            index
            for index, sequence in enumerate(sequences)
            if sequence[:end] == prompt_ids + token_ids and logprobs[index][start:end] == values
        ]
        own = [index for index in places if all(trained[index][start:end])]
        assert len(own) == times, f"written {times} times, in {len(places)} sequences, trained in {len(own)}"
        for index in own:
            trained[index][start:end] = [2] * (end - start)
    assert not any(1 in mask for mask in trained)
