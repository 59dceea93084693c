"""A run of `rlpipe train` or `rlpipe sft` and its metrics, for benchmarks that compare whole runs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def train(
    config: str,
    folder: Path,
    name: str,
    settings: list[str],
    command: str = "train",
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, float]]:
    """Metrics by iteration of the run `name`, whose folder lies in `folder`; what it prints goes to standard error.

    command: of rlpipe, `train` or `sft`. environment: variables that the run has besides those of this process.

    Raises CalledProcessError when the run fails.
    """
    places = [f"run.directory={folder}", f"run.name={name}"]
    arguments = [sys.executable, "-m", "rlpipe", command, config, *places, *settings]
    variables = {**os.environ, **(environment or {})}
    subprocess.run(arguments, cwd=PROJECT, check=True, stdout=sys.stderr, env=variables)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
