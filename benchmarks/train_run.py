"""A run of `rlpipe train` or `rlpipe sft` and its metrics, for benchmarks that compare whole runs."""

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def train(config: str, folder: Path, name: str, settings: list[str], command: str = "train") -> list[dict[str, float]]:
    """Metrics by iteration of the run `name`, whose folder lies in `folder`; what it prints goes to standard error.

    command: of rlpipe, `train` or `sft`.

    Raises CalledProcessError when the run fails.
    """
    places = [f"run.directory={folder}", f"run.name={name}"]
    arguments = [sys.executable, "-m", "rlpipe", command, config, *places, *settings]
    subprocess.run(arguments, cwd=PROJECT, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
