"""Environments of `verifiers`, unchanged: they talk to the policy through its OpenAI-compatible endpoint.

    rollout:
      generate:
        function: agent
        agent:
          run: rlpipe.environments.adapters.verifiers_agent:verifiers_episode
          options: {environment: "my_package.my_module:load_environment"}

Their rubric grades. `write_rows` makes the data files of an environment's own data sets.
"""

import contextlib
import json
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

from rlpipe.shared.errors import ConfigError, DataError
from rlpipe.shared.named_function import named_function
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "verifiers.envs.environment:Environment.__post_init__",
    why="it takes the run's handlers of SIGINT and SIGTERM, and cannot be made beside the main thread",
    drop_when="it leaves signals alone",
)

_PLACE = "the agent verifiers_episode: environment"
_LOADING = threading.Lock()


class Episode(Protocol):
    """What the adapter uses of `rlpipe.agents.agent_task.AgentTask`."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def messages(self) -> list[dict[str, Any]]: ...
    @property
    def label(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


async def verifiers_episode(
    task: Episode,
    environment: str,
    arguments: Mapping[str, Any] = {},
    sampling: Mapping[str, Any] = {},
) -> dict[str, float]:
    """Plays one episode and returns its reward by the environment's rubric.

    environment: the id of an installed environment, or `package.module:function` that makes one; `arguments` are its
    keyword arguments, `sampling` those of each request. Raises what the environment raises.
    """
    from openai import AsyncOpenAI

    loaded = load(environment, json.dumps(dict(arguments), sort_keys=True))
    row = {
        "prompt": task.messages,
        "answer": task.label,
        "task": str(task.metadata.get("task") or "default"),
        "info": task.metadata.get("info") or {},
        "example_id": int(task.metadata.get("example_id") or 0),
    }
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        state = await loaded.rollout(row, client, task.model, dict(sampling))
        await loaded.rubric.score_rollout(state, score_sem=contextlib.nullcontext())
    return {"reward": float(state["reward"])}


@cache
def load(environment: str, arguments: str) -> Any:
    """The environment, made once per process; arguments: JSON. Raises ConfigError where the package is missing."""
    try:
        import verifiers
        import verifiers.envs.environment as module
    except ImportError:
        raise ConfigError(f"{_PLACE} {environment!r} needs the package verifiers: install it beside rlpipe") from None
    # Handlers of signals belong to the run; it ends what it has started by itself.
    quiet = SimpleNamespace(**{**vars(signal), "signal": lambda number, handler: None})
    options = json.loads(arguments)
    with _LOADING, mock.patch.object(module, "signal", quiet):
        if ":" in environment:
            return named_function(environment, {}, _PLACE)(**options)
        return verifiers.load_environment(environment, **options)


def write_rows(environment: str, folder: Path, arguments: Mapping[str, Any] = {}) -> dict[str, int]:
    """Writes train.jsonl and test.jsonl of the environment's data sets into `folder`; returns how many rows each has.

    Raises DataError where it has no training data.
    """
    loaded = load(environment, json.dumps(dict(arguments), sort_keys=True))
    if loaded.dataset is None:
        raise DataError(f"the environment {environment!r} has no data set to train on")
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, rows in (("train", loaded.dataset), ("test", loaded.eval_dataset)):
        if rows is not None:
            lines = [json.dumps(row, default=str) for row in _rows(rows)]
            (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
            counts[name] = len(lines)
    return counts


def _rows(dataset: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(dataset):
        kept = {name: row[name] for name in ("task", "info") if row.get(name)}
        answer = row.get("answer")
        label = "-" if answer in (None, "") else str(answer)
        yield {"prompt": row["prompt"], "label": label, "example_id": row.get("example_id", number), **kept}
