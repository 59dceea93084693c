"""Other libraries' environments and tools, as they are: gymnasium, MCP servers, machines that commands are run on."""

import asyncio
import json
import os
import sys
from pathlib import Path

import gymnasium
import httpx
import psutil
import pytest
from fastapi import FastAPI, HTTPException
from gymnasium import spaces
from scripted_policy import ScriptedPolicy, conversation_of, text_of

from rewards.sandbox.program import namespaces_work
from rlpipe.config.environment import EnvironmentConfig, ToolLimits
from rlpipe.environments.adapters.command_sandbox import HttpSandbox, LocalSandbox
from rlpipe.environments.episode import EnvironmentFailure, environment_function
from rlpipe.environments.tasks.commands import Commands, harbor_row
from rlpipe.shared.errors import ConfigError, DataError

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="this machine permits no namespaces")


def played(tokenizer, name, row, *texts, limit=4000, **settings):
    config = EnvironmentConfig(**{"name": name, "reset_retries": 0} | settings)
    conversation = conversation_of(ScriptedPolicy(tokenizer, *texts), row.get("prompt", "?"), limit, row)
    asyncio.run(environment_function(config, 4000)(conversation))
    (sample,) = conversation.episode()
    return sample


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


class Corridor(gymnasium.Env):
    """Text in, text out: `left` and `right` along a corridor whose treasure the seed places."""

    observation_space = spaces.Text(64)
    action_space = spaces.Text(8)
    closed = 0

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.treasure = 0, int(self.np_random.integers(2, self.length))
        return f"the treasure is {self.treasure} doors to the right", {}

    def step(self, action):
        self.place += {"left": -1, "right": 1}.get(action, 0)
        found = self.place == self.treasure
        return f"door {self.place}", float(found), found, False, {"won": found}

    def close(self):
        type(self).closed += 1


class Numbered(Corridor):
    action_space = spaces.Discrete(2, start=1)

    def step(self, action):
        return super().step({1: "left", 2: "right"}[action])


def numbers(observation):
    return "".join(character for character in observation if character.isdigit())


def test_a_text_environment_of_gymnasium_is_played_and_closed(tokenizer):
    Corridor.closed = 0
    gymnasium.register("rlpipe-test/Corridor-v0", Corridor, max_episode_steps=4)
    options = {"make": "rlpipe-test/Corridor-v0", "arguments": {"length": 3}}
    sample = played(tokenizer, "gymnasium", {"seed": 3}, *["right<end>"] * 2, options=options)
    assert sample.prompt.text.count("the treasure is 2 doors to the right") == 1
    assert [turn.reward for turn in sample.turns] == [0.0, 1.0]
    assert (sample.outcome.success, sample.outcome.state["steps"], Corridor.closed) == (True, 2, 1)
    cut = played(tokenizer, "gymnasium", {"seed": 3}, *["left<end>"] * 4, options=options)
    assert (cut.outcome.success, cut.outcome.state["cut"], cut.outcome.ended) == (False, True, "done")


def test_numbered_actions_are_read_and_wrong_ones_are_told(tokenizer):
    options = {
        "make": f"{__name__}:Numbered",
        "arguments": {"length": 3},
        "observe": f"{__name__}:numbers",
        "invalid_reward": -0.5,
        "success_reward": 1.0,
    }
    sample = played(tokenizer, "gymnasium", {}, "3<end>", "2<end>", "right<end>", " 2<end>", options=options)
    assert [turn.reward for turn in sample.turns] == [-0.5, 0.0, -0.5, 1.0]
    assert "an action is a number from 1 to 2\n2<|im_end|>" in text_of(sample, tokenizer)
    assert (sample.outcome.success, sample.outcome.state["invalid"]) == (True, 2)
    with pytest.raises(ConfigError, match="is not registered"):
        played(tokenizer, "gymnasium", {}, options={"make": "no-such-v0"})


def test_an_mcp_server_lives_for_one_episode_and_its_failures_are_answers(tokenizer):
    options = {"command": SERVER, "environment": {"COLOR": "blue"}, "question": "question"}
    texts = (
        call("note", text="<|im_end|>one") + call("note", text="two") + "<end>",
        call("fail") + call("note", words=1) + "<end>",
        call("leave") + "<end>",
        call("note", text="three") + "<end>",
        "done<end>",
    )
    row = {"question": "take notes", "label": "-"}
    limits = ToolLimits(timeout_seconds=20)
    sample = played(tokenizer, "mcp", row, *texts, options=options, tools=limits, max_turns=9)
    told = text_of(sample, tokenizer)
    assert "1 notes, blue" in told and "2 notes, blue" in told and "no such page" in told
    failures = [use.failure for turn in sample.turns for use in turn.tools]
    assert failures == ["", "", "error", "arguments", "error", "error"]
    assert "take notes" in sample.prompt.text
    assert (sample.outcome.ended, sample.outcome.cleanup_failed) == ("done", False)
    left = psutil.process_iter(["ppid", "cmdline"])  # attributes of a process that ends meanwhile are None
    assert not [one for one in left if one.info["ppid"] == os.getpid() and "mcp_server.py" in str(one.info["cmdline"])]


def test_an_mcp_server_that_does_not_start_or_lacks_a_tool_is_told(tokenizer):
    with pytest.raises(EnvironmentFailure, match="its reset failed"):
        played(tokenizer, "mcp", {}, options={"command": [sys.executable, "-c", "print('no protocol')"]})
    with pytest.raises(ConfigError, match="the server has no tool 'read'"):
        played(tokenizer, "mcp", {}, options={"command": SERVER, "only": ["read"]})
    with pytest.raises(ConfigError, match="'no_such_server' is no program that can be run here"):
        played(tokenizer, "mcp", {}, options={"command": ["no_such_server"]})
    with pytest.raises(ConfigError, match="command is empty"):
        played(tokenizer, "mcp", {}, options={"command": []})


@needs_namespaces
def test_a_local_machine_keeps_files_and_nothing_else():
    async def use():
        machine = LocalSandbox(folder_bytes=2**16)
        await machine.start("", {"src/a.txt": "one\n", "go.sh": "#!/bin/sh\necho went\n"})
        first = await machine.run("echo two >> src/a.txt; cat src/a.txt; ./go.sh; (sleep 60 &) ; exit 3", 60)
        second = await machine.run("cat src/a.txt; echo oops >&2; ln -s /etc/passwd link; sleep 600", 3)
        large = await machine.run("head -c 1000000 /dev/urandom > large; echo made", 60)
        outside = await machine.run("ls large link 2>&1; cat /etc/shadow; wc -l < src/a.txt", 60)
        with pytest.raises(ValueError, match="no file of the working folder"):
            await machine.add({"../out": "x"})
        return first, second, large, outside, await machine.read("./src/a.txt"), await machine.read("none")

    first, second, large, outside, text, none = asyncio.run(use())
    assert (first.exit_code, first.output) == (3, "one\ntwo\nwent\n")
    assert (second.timed_out, second.output[:13]) == (True, "one\ntwo\noops\n")
    assert "the folder is as before" in large.output
    assert "large" in outside.output and "No such file" in outside.output and "root:" not in outside.output
    assert outside.output.endswith("2\n")
    assert (text, none) == ("one\ntwo\n", None)


@needs_namespaces
def test_a_task_in_harbors_layout_is_solved_by_commands_and_its_verdict_cannot_be_forged(tokenizer, tmp_path):
    (tmp_path / "environment").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "instruction.md").write_text("make greet.py print hello")
    (tmp_path / "environment/Dockerfile").write_text("FROM python")
    (tmp_path / "environment/greet.py").write_text("print('bye')\n")
    (tmp_path / "tests/check.py").write_text(
        "import subprocess as s\nassert s.check_output(['python', 'greet.py']) == b'hello\\n'"
    )
    verdict = "/logs/verifier/reward.txt"
    (tmp_path / "tests/test.sh").write_text(f"echo 0.25 > {verdict}\npython /tests/check.py && echo 1 > {verdict}\n")
    row = json.loads(json.dumps(harbor_row(tmp_path)))
    assert set(row["files"]) == {"greet.py"}
    solved = played(
        tokenizer,
        "commands",
        row,
        call("bash", command="ls -a; cat greet.py; sed -i s/bye/hello/ greet.py; python greet.py") + "<end>",
        "done<end>",
    )
    assert "tests" not in text_of(solved, tokenizer) and "hello\nexit code 0" in text_of(solved, tokenizer)
    assert (solved.outcome.success, solved.outcome.reward) == (True, 1.0)
    forged = played(
        tokenizer,
        "commands",
        row,
        call("bash", command="mkdir .verifier; echo 1 > .verifier/reward.txt")
        + call("write_file", path="tests/check.py", text="")
        + "<end>",
        "done<end>",
    )
    assert (forged.outcome.success, forged.outcome.reward, forged.outcome.state["commands"]) == (False, 0.25, 1)
    with pytest.raises(DataError, match="instruction.md is missing"):
        harbor_row(tmp_path / "tests")


def service(machines):
    """A service of machines whose commands are Python expressions over their files."""
    app = FastAPI()

    @app.post("/sandboxes")
    async def make(body: dict):
        machines[f"m{len(machines)}"] = {"image": body["image"], **body["files"]}
        return {"id": f"m{len(machines) - 1}"}

    @app.post("/sandboxes/{name}/commands")
    async def run(name: str, body: dict):
        return {"exit_code": 0, "output": f"{body['command']} in {machines[name]['image']}"}

    @app.put("/sandboxes/{name}/files")
    async def add(name: str, body: dict):
        machines[name].update(body["files"])

    @app.get("/sandboxes/{name}/files")
    async def read(name: str, path: str):
        if path not in machines[name]:
            raise HTTPException(404)
        return {"text": machines[name][path]}

    @app.delete("/sandboxes/{name}")
    async def end(name: str):
        del machines[name]

    return app


def test_a_remote_machine_is_made_used_and_given_back_though_connections_fail(monkeypatch):
    machines, fails = {}, [2]

    class Unsteady(httpx.ASGITransport):
        async def handle_async_request(self, request):
            if fails[0]:
                fails[0] -= 1
                raise httpx.ConnectError("refused")
            return await super().handle_async_request(request)

    async def use():
        client = httpx.AsyncClient(transport=Unsteady(service(machines)), base_url="http://service")
        machine = HttpSandbox("http://service", client=client)
        await machine.start("ubuntu", {"a": "one"})
        await machine.add({"b": "two"})
        outcome = await machine.run("ls", 5)
        read = await machine.read("b"), await machine.read("c")
        there = len(machines)
        await machine.stop()
        return outcome, read, there

    outcome, read, there = asyncio.run(use())
    assert (outcome.exit_code, outcome.output) == (0, "ls in ubuntu")
    assert (read, there, machines, fails) == (("two", None), 1, {}, [0])
    for options in ({"where": "remote"}, {"where": "local", "url": "http://x"}, {"where": "moon"}):
        with pytest.raises(ConfigError, match="give url for 'remote' alone"):
            Commands(**options)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY, which is not set"):
        Commands(where="remote", url="http://x", key_variable="NO_SUCH_KEY")
