"""The command line in a process forked from a server that has imported what is slow to import."""

import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_forked(
    folder: Path, *arguments: str, largest_file_bytes: int = resource.RLIM_INFINITY
) -> subprocess.CompletedProcess[str]:
    """`rlpipe ARGUMENTS` as its own process sees it; `folder` takes what it prints. A file that becomes larger than
    `largest_file_bytes` is refused as by a full disk."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.actor.worker_imports"])  # one server for all tests of a worker
    printed = folder / "stdout", folder / "stderr"
    process = context.Process(target=_run, args=(arguments, *printed, largest_file_bytes))
    process.start()
    process.join(400)
    assert process.exitcode is not None, "no end within 400 seconds"
    return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in printed))


def _run(arguments: tuple[str, ...], stdout: Path, stderr: Path, largest_file_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, largest_file_bytes))
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = ["rlpipe", *arguments]
    from rlpipe.cli import main

    main()
