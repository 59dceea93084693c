"""What the agents' endpoint costs the driver for each turn, and a thousand episodes at once.

    python benchmarks/agents.py [--episodes 1000] [--turns 8] [--engine-seconds 1.0]

A policy that answers by itself stands in the place of engines, so that nothing but the driver is measured.
"""

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # instead of this folder, where files hide packages

from rlpipe.agents.agent_episode import AgentEpisode  # noqa: E402
from rlpipe.agents.agent_maker import AgentMaker  # noqa: E402
from rlpipe.agents.agent_task import AgentTask  # noqa: E402
from rlpipe.agents.chat_rendering import ChatRenderer  # noqa: E402
from rlpipe.agents.endpoint import Endpoint  # noqa: E402
from rlpipe.config.root import Config  # noqa: E402
from rlpipe.generation.event_loop import BackgroundLoop  # noqa: E402
from rlpipe.generation.prompt_requests import PromptRequest  # noqa: E402
from rlpipe.prepare.tokenizer import byte_tokenizer  # noqa: E402
from rlpipe.shared.sample import Prompt, Status, VersionSpan  # noqa: E402
from rollout.partial_response import PartialResponse  # noqa: E402
from rollout.requests import GenerateRequest, Generation, SamplingParameters  # noqa: E402

_TOOL_CALL = 'I will look.<tool_call>\n{"name": "look_up", "arguments": {"query": "weather"}}\n</tool_call>'
_PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
_TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": _PARAMETERS}}]
_SYSTEM = "You are an agent with tools. " * 10
_RESULT = "It is sunny, 21 degrees, with wind from the west. " * 4
_WARM_UP_EPISODES = 4

Returned = TypeVar("Returned")

# A client that costs the driver nothing: it is another process, and keeps its connection.
_CLIENT = """
import json, sys, httpx
asked = json.loads(sys.stdin.readline())
with httpx.Client(headers={"authorization": "Bearer " + asked["key"]}, timeout=60) as client:
    for url in asked["urls"]:
        messages = list(asked["messages"])
        for _ in range(asked["turns"]):
            body = {"model": "policy", "messages": messages, "tools": asked["tools"]}
            message = client.post(url + "/chat/completions", json=body).json()["choices"][0]["message"]
            call = message["tool_calls"][0]["id"]
            messages += [message, {"role": "tool", "tool_call_id": call, "content": asked["result"]}]
        print(url, flush=True)
"""


class Policy:
    """Answers each request with one call of a tool, after a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        tokenizer = byte_tokenizer()
        self.token_ids = (*tokenizer(_TOOL_CALL, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        self.logprobs = tuple(-random.Random(0).random() for _ in self.token_ids)
        self.running = self.most_running = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        self.running -= 1
        spans = (VersionSpan(1, len(self.token_ids)),)
        return Generation(
            request.request_id, self.token_ids, self.logprobs, Status.COMPLETED, spans, 0, self.seconds, 0
        )


class TimedRenderer(ChatRenderer):
    """Adds up the time of the tokenizer itself."""

    tokenizer_seconds = 0.0

    def token_ids(self, text: str) -> list[int]:
        return self._timed(super().token_ids, text)

    def text_of(self, token_ids: Sequence[int], special: bool = False) -> str:
        return self._timed(super().text_of, token_ids, special)

    def _timed(self, function: Callable[..., Returned], *arguments: Any) -> Returned:
        begin = time.thread_time()
        result = function(*arguments)
        self.tokenizer_seconds += time.thread_time() - begin
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--engine-seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    print(f"{'turns of a dialogue':<24}{'prompt tokens':>14}{'driver, ms a turn':>20}{'of it tokenizer':>18}")
    for turns in (2, arguments.turns, 4 * arguments.turns):
        _cost_of_a_turn(turns, episodes=max(10, 400 // turns))
    _many_at_once(arguments.episodes, arguments.turns, arguments.engine_seconds)


def _cost_of_a_turn(turns: int, episodes: int) -> None:
    """CPU time of the thread that serves, over the turns of dialogues one after another."""
    loop = BackgroundLoop("endpoint")
    renderer, policy = TimedRenderer(byte_tokenizer()), Policy(0.0)
    endpoint = Endpoint(renderer, "policy", Counter())
    loop.submit(endpoint.start()).result()
    urls = [endpoint.open_episode(_episode(f"e{n}", policy, renderer)) for n in range(_WARM_UP_EPISODES + episodes)]
    asked = {
        "key": endpoint.key,
        "urls": urls,
        "turns": turns,
        "tools": _TOOLS,
        "result": _RESULT,
        "messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "How is the weather?"}],
    }
    with subprocess.Popen([sys.executable, "-c", _CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin and client.stdout
        client.stdin.write(json.dumps(asked).encode() + b"\n")
        client.stdin.flush()
        for _ in range(_WARM_UP_EPISODES):
            client.stdout.readline()
        begin, tokenizer = loop.submit(_thread_seconds()).result(), renderer.tokenizer_seconds
        for _ in range(episodes):
            client.stdout.readline()
        seconds = loop.submit(_thread_seconds()).result() - begin
        tokenizer = renderer.tokenizer_seconds - tokenizer
    tokens = endpoint._episodes[urls[-1].split("/")[-2]].samples()[0].total_tokens
    loop.submit(endpoint.stop()).result()
    loop.close()
    count = turns * episodes
    print(f"{turns:<24}{tokens:>14,}{1e3 * seconds / count:>20.2f}{1e3 * tokenizer / count:>18.2f}")


def _episode(name: str, policy: Policy, renderer: ChatRenderer) -> AgentEpisode:
    return AgentEpisode(_request(name), policy, renderer, 0, 10**6, Counter())


def _request(name: str) -> PromptRequest:
    prompt = Prompt("data/0", "", (1,), "", "data", {"prompt": "How is the weather?"})
    return PromptRequest(name, name, prompt, SamplingParameters(10**6))


async def _thread_seconds() -> float:
    return time.thread_time()


async def agent(task: AgentTask, turns: int) -> float:
    """Asks, and answers each call."""
    async with task.client() as client:
        messages = [{"role": "system", "content": _SYSTEM}, *task.messages]
        for _ in range(turns):
            answer = await client.chat.completions.create(model=task.model, messages=messages, tools=_TOOLS)  # type: ignore[arg-type]
            message = answer.choices[0].message
            call = (message.tool_calls or [])[0]
            messages += [
                message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": _RESULT},
            ]
    return 1.0


def _many_at_once(episodes: int, turns: int, engine_seconds: float) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "agents", "iterations": 1},
            "model": {"path": "policy"},
            "data": {"train": [{"name": "data", "path": "unused"}], "max_prompt_tokens": 4096},
            "actor": {"max_tokens_per_gpu": 2**21},
            "rollout": {
                "max_response_tokens": 2**20,
                "generate": {
                    "function": "agent",
                    "agent": {"run": "benchmarks.agents:agent", "options": {"turns": turns}, "concurrency": episodes},
                },
            },
        }
    )
    policy, maker, loop = Policy(engine_seconds), AgentMaker(config), BackgroundLoop("rollouts")
    maker.open(policy, byte_tokenizer(), 0)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    made = [loop.submit(maker.make(_request(f"e{number}"), PartialResponse())) for number in range(episodes)]
    samples = [one.result().episode for one in made]
    seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    metrics = maker.take_metrics()
    maker.close()
    loop.close()
    assert all(episode is not None and len(episode) == 1 for episode in samples)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{episodes} episodes at once, {turns} turns each, engines take {engine_seconds:g} s a turn: {seconds:.1f} s, "
        f"{episodes * turns / seconds:,.0f} turns/s, {1e3 * cpu / (episodes * turns):.2f} ms of "
        "processor a turn with the agents' own clients in the same process, at most "
        f"{policy.most_running} requests in flight, {metrics['agent/requests_count']:.0f} answered, "
        f"{threading.active_count()} threads, {peak:.2f} GiB at the peak"
    )


if __name__ == "__main__":
    main()
