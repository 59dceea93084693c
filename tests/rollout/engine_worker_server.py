"""Has imported SGLang, and runs the programs that it is told in processes forked from it. It ends with its input."""

import json
import os
import runpy
import sys
import traceback
from typing import NoReturn

import sglang.srt.managers.scheduler  # noqa: F401

from rlpipe.shared.collection import keep_what_lives


def main() -> None:
    keep_what_lives()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        for line in sys.stdin:
            arguments, stdout, stderr = json.loads(line)
            child = os.fork()
            if child == 0:
                _become(arguments, stdout, stderr)
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _become(arguments: list[str], stdout: str, stderr: str) -> NoReturn:
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
