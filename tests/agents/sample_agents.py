"""Agents as people write them: they know an OpenAI client and nothing of what trains their model."""

import asyncio
import json
import os
import sys
import time

import openai

from rlpipe.agents.agent_task import AgentTask

_HANGS_SECONDS = 40  # longer than any of its time limits, and an end for who forgets them
CLIENTS: dict[object, openai.AsyncOpenAI] = {}


def client_of(task: AgentTask) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)


async def two_turns(task: AgentTask, reward: float | None = 0.5):
    async with client_of(task) as client:
        messages = task.messages
        for _ in range(2):
            answer = await client.chat.completions.create(model=task.model, messages=messages)
            messages = [*messages, answer.choices[0].message, {"role": "user", "content": "again"}]
    return {"reward": reward, "correct": True} if reward is not None else messages[-2].content


async def rewards_its_turns(task: AgentTask, unknown: bool = False):
    """A turn with two choices, a plain completion, and a turn that it says nothing of."""
    async with client_of(task) as client:
        chat = await client.chat.completions.create(model=task.model, messages=task.messages, n=2)
        plain = await client.completions.create(model=task.model, prompt="go")
        await client.completions.create(model=task.model, prompt="on")
    rewards = {chat.id: 0.25, plain.id: -1.0, **({"chatcmpl-0": 1.0} if unknown else {})}
    return {"reward": 2.0, "correct": True, "turn_rewards": rewards}


def plain_function(task: AgentTask):
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        client.chat.completions.create(model=task.model, messages=task.messages)
    return 1.0


async def asks_for_json(task: AgentTask):
    async with client_of(task) as client:
        form = {"type": "json_object"}
        await client.chat.completions.create(model=task.model, messages=task.messages, response_format=form)
    return 1.0


async def asks_nothing(task: AgentTask):
    return 1.0


async def fails_after_a_turn(task: AgentTask):
    async with client_of(task) as client:
        await client.chat.completions.create(model=task.model, messages=task.messages)
    raise KeyError("of the agent's own")


async def hangs_after_a_turn(task: AgentTask):
    async with client_of(task) as client:
        await client.chat.completions.create(model=task.model, messages=task.messages)
    await asyncio.sleep(_HANGS_SECONDS)


def hangs_in_its_thread(task: AgentTask):
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        client.chat.completions.create(model=task.model, messages=task.messages)
    time.sleep(_HANGS_SECONDS)


async def reports_nonsense(task: AgentTask):
    await two_turns(task)
    return {"score": 1}


def main() -> None:
    """As a program of its own."""
    task = json.loads(sys.stdin.readline())
    client = openai.OpenAI()
    messages = [{"role": "user", "content": task["prompt"]}]
    client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    if "fail" in sys.argv:
        sys.exit("no luck")
    if "hang" in sys.argv:
        time.sleep(_HANGS_SECONDS)
    print("some talk")
    print(json.dumps({"reward": 0.25, "answer": f"label {task['label']}"}))


if __name__ == "__main__":
    main()
