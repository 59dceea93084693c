"""An environment of verifiers, unchanged, against a server that speaks OpenAI's protocol."""

import asyncio
import json
import signal
import threading
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI

from rlpipe.environments.adapters.verifiers_agent import verifiers_episode, write_rows
from rlpipe.shared.errors import ConfigError

pytest.importorskip("verifiers")
GAME = "verifiers_game:load_environment"


def answers(*messages):
    """A server whose policy says `messages`, one after the other; and the requests that it gets."""
    app, asked, left = FastAPI(), [], list(messages)

    @app.post("/v1/chat/completions")
    async def complete(body: dict):
        asked.append(body)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None, **left.pop(0)}}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}

    return app, asked


async def served(app, use):
    """What `use` returns, called with the address of `app` while it is served."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        return await use(f"http://127.0.0.1:{port}/v1")
    finally:
        server.should_exit = True
        await running


def test_an_environment_runs_unchanged_beside_the_main_thread_and_its_rubric_grades():
    call = {"id": "c1", "type": "function", "function": {"name": "double", "arguments": '{"number": 21}'}}
    app, asked = answers({"tool_calls": [call]}, {"content": "it is 42"})
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    found = []

    async def use(url):
        messages = [{"role": "user", "content": "double 21"}]
        metadata = {"example_id": 0, "info": {"number": 21}}
        task = SimpleNamespace(
            base_url=url, api_key="k", model="policy", messages=messages, label="42", metadata=metadata
        )
        return await verifiers_episode(task, GAME, {"goal": "42"}, {"temperature": 1.0})

    thread = threading.Thread(target=lambda: found.append(asyncio.run(served(app, use))))
    thread.start()
    thread.join(60)
    assert found == [{"reward": 1.25}]
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1]["messages"][2]["content"] == "42"
    assert asked[0]["tools"][0]["function"]["name"] == "double"
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_an_environments_data_sets_become_rows(tmp_path):
    assert write_rows(GAME, tmp_path, {"system_prompt": "be brief"}) == {"train": 2, "test": 1}
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [row["example_id"] for row in rows] == [0, 1]
    assert rows[1]["prompt"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "double 7"},
    ]
    assert (rows[1]["label"], rows[1]["info"]) == ("42", {"number": 7})
    with pytest.raises(ConfigError, match="cannot import"):
        write_rows("no_such_game:load_environment", tmp_path)
