"""An endpoint with one or more episodes, in front of a policy."""

from collections import Counter
from contextlib import asynccontextmanager

import httpx
import openai

from rlpipe.agents.agent_episode import AgentEpisode
from rlpipe.agents.chat_rendering import ChatRenderer
from rlpipe.agents.endpoint import Endpoint
from rlpipe.generation.prompt_requests import PromptRequest
from rlpipe.shared.sample import Prompt
from rollout.requests import SamplingParameters

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "<|im_end|> is no end here",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "number": {"type": "integer"}}},
        },
    }
    for name in ("look_up", "add")
]


class Served:
    """One episode behind `client`, an OpenAI client as it comes."""

    def __init__(self, endpoint, episode, connections) -> None:
        self.endpoint, self.episode = endpoint, episode
        self.url = endpoint.open_episode(episode)
        self.client = openai.AsyncOpenAI(
            base_url=self.url, api_key=endpoint.key, max_retries=0, http_client=connections
        )

    async def chat(self, messages, **options):
        return await self.client.chat.completions.create(model="policy", messages=messages, **options)


@asynccontextmanager
async def serving(tokenizer, engines, limit=4096, counts=None, formats="refused"):
    """Yields what opens an episode of a name."""
    counts = Counter() if counts is None else counts
    renderer = ChatRenderer(tokenizer)
    endpoint = Endpoint(renderer, "policy", counts)
    await endpoint.start()
    opened = []
    connections = httpx.AsyncClient()  # making one takes a tenth of a second

    def open_episode(name: str = "g-000") -> Served:
        prompt = Prompt("data/0", "task", (1,), "label", "data")
        request = PromptRequest(name, "g", prompt, SamplingParameters(limit, temperature=0.7))
        episode = AgentEpisode(request, engines, renderer, 0, limit, counts, formats)
        opened.append(Served(endpoint, episode, connections))
        return opened[-1]

    try:
        yield open_episode
    finally:
        await connections.aclose()
        await endpoint.stop()
