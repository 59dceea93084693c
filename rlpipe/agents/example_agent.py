"""A worked example: an agent that knows an OpenAI client, and nothing of what trains its model."""

from typing import Any

from rlpipe.agents.agent_task import AgentTask


async def asks_twice(task: AgentTask) -> None:
    """Asks for a sum, and once more where the reply has no answer. The grader of the run looks at the last reply."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages: list[Any] = list(task.messages)
        for _ in range(2):
            completion = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=48)
            reply = completion.choices[0].message
            if reply.content and "Answer:" in reply.content:
                return
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": "The answer?"},
            ]
