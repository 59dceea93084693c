"""A policy that writes given texts, in front of real conversations."""

from rlpipe.generation.conversation import Conversation
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.shared.sample import Prompt, Status, VersionSpan
from rollout.requests import Generation, SamplingParameters


class ScriptedPolicy:
    """Answers request after request with `texts`; `<end>` at the end of one is the end-of-sequence token."""

    def __init__(self, tokenizer, *texts: str) -> None:
        self.tokenizer, self.texts, self.requests = tokenizer, list(texts), []

    async def generate(self, request):
        self.requests.append(request)
        text = self.texts.pop(0)
        ids = tuple(self.tokenizer(text.removesuffix("<end>"), add_special_tokens=False)["input_ids"])
        if text.endswith("<end>"):
            ids += (self.tokenizer.eos_token_id,)
        limit = request.sampling.max_new_tokens
        status = Status.COMPLETED if len(ids) <= limit else Status.TRUNCATED
        ids = ids[:limit]
        spans = (VersionSpan(1, len(ids)),)
        return Generation(request.request_id, ids, (-0.5,) * len(ids), status, spans, 0, 0.25, 0)


def conversation_of(policy, prompt="task", limit=512, columns=None, sample_id="g-0"):
    ids = tuple(policy.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    columns = columns or {}
    row = Prompt("data/0", prompt, ids, str(columns.get("label", "-")), "data", columns)
    return Conversation(PromptRequest(sample_id, "g", row, SamplingParameters(limit)), policy, policy.tokenizer, 0)


def text_of(sample, tokenizer) -> str:
    """The whole response, special tokens written out."""
    return tokenizer.decode(list(sample.response_ids))


def trained_text(sample, tokenizer) -> str:
    """What of the response is trained."""
    pairs = zip(sample.response_ids, sample.loss_mask, strict=True)
    return tokenizer.decode([token for token, trained in pairs if trained])
