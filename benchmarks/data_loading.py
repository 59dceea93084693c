"""Seconds and memory that the training rows take at the start of a run: the first time, and when they are prepared.

    python benchmarks/data_loading.py [--rows 300000] [--folder FOLDER]

Each start is a process of its own, as a run's is: it opens the rows, shuffles them, and takes prompts from all over.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_START = """
import sys, time
from rlpipe.config.data import DatasetConfig
from rlpipe.data import PromptStream, load_prompts
from rlpipe.data.mapped_rows import Preparation
from rlpipe.prepare.tokenizer import byte_tokenizer

def megabytes(kind):
    line = next(line for line in open("/proc/self/smaps_rollup") if line.startswith(kind))
    return f"{int(line.split()[1]) / 1000:.0f} MB"

tokenizer = byte_tokenizer()
before = megabytes("Rss")
begin = time.perf_counter()
dataset = DatasetConfig(name="chat", path=sys.argv[1], prompt_column="messages", label_column="answer")
prompts = load_prompts([dataset], tokenizer, 2048, False, Preparation(sys.argv[2])).prompts
stream = PromptStream(prompts, seed=0, shuffle=True)
stream.take(1)
opened, resident, own = time.perf_counter() - begin, megabytes("Rss"), megabytes("Anonymous")
begin = time.perf_counter()
stream.take(4096)
print(f"{len(prompts):,} prompts in {opened:.1f} s; resident {resident}, {before} of it before any row was read;")
print(f"{own} not backed by files; 4,096 prompts from all over in {time.perf_counter() - begin:.1f} s")
"""


def main() -> None:
    """Write rows, then start with them twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000, help="chat rows of about 300 bytes")
    parser.add_argument("--folder", type=Path, help="where rows and what is made of them are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"chat-{options.rows}.jsonl"
        if not path.exists():
            _write(path, options.rows)
        for name in ("first start", "second start"):
            print(f"{name}:", _start(path, folder / "cache"), flush=True)


def _write(path: Path, rows: int) -> None:
    question = "How many apples are left if {} of {} are eaten, and how do you know? Explain each step of your answer. "
    with path.open("w") as file:
        for row in range(rows):
            turn = {"role": "user", "content": question.format(row % 977, row) * 2}
            file.write(json.dumps({"messages": [turn], "answer": str(row - row % 977), "source": "made"}) + "\n")


def _start(path: Path, cache: Path) -> str:
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _START, str(path), str(cache)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return f"{' '.join(done.stdout.split())} ({time.perf_counter() - begin:.1f} s with all imports)"


if __name__ == "__main__":
    main()
