"""Signals in a process of their own: what they end, what they let finish, and what is left below it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rlpipe.shared.descendants import end_of, is_stopped

SCRIPT = """
import os, signal, sys, time
from rlpipe.shared import interrupts
interrupts.install()
def signal_comes(): os.kill(os.getpid(), signal.SIGTERM)
def say(text): print(text, flush=True)
try:
{body}
except KeyboardInterrupt:
    say("interrupted")
"""


def said(body: str) -> list[str]:
    script = SCRIPT.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_signal_ends_what_runs_at_once() -> None:
    assert said("signal_comes()\nsay('not here')") == ["interrupted"]


def test_what_finishes_goes_on_to_its_end_and_is_interrupted_there() -> None:
    body = (
        "with interrupts.finishing(30):\n signal_comes()\n say('finished')\ninterrupts.raise_if_requested()\nsay('no')"
    )
    assert said(body) == ["finished", "interrupted"]


def test_what_finishes_has_no_more_than_its_grace() -> None:
    begin = time.monotonic()
    assert said("with interrupts.finishing(0.3):\n signal_comes()\n time.sleep(50)\n say('no')") == ["interrupted"]
    assert time.monotonic() - begin < 30


def test_the_grace_counts_from_the_signal() -> None:
    body = (
        "with interrupts.shielded():\n signal_comes()\n time.sleep(1)\nwith interrupts.finishing(0.9):\n time.sleep(9)"
    )
    assert said(body) == ["interrupted"]


def test_no_signal_cuts_cleaning_up_short() -> None:
    body = (
        "with interrupts.CleanupStack() as stack:\n"
        " stack.callback(say, 'outer')\n stack.callback(signal_comes)\n stack.callback(say, 'inner')\n signal_comes()"
    )
    assert said(body) == ["inner", "outer", "interrupted"]


def test_an_interrupt_that_a_library_swallows_comes_again() -> None:
    body = "try:\n signal_comes()\nexcept BaseException:\n say('swallowed')\ninterrupts.raise_if_requested()"
    assert said(body) == ["swallowed", "interrupted"]


def test_no_descendant_is_left_and_strangers_are() -> None:
    """A stopped child, a child that ignores SIGTERM, and a grandchild that left its session and its parent."""
    script = """
import os, signal, subprocess, sys, time
from rlpipe.shared.descendants import adopt_orphans, descendants, end_descendants
adopt_orphans()
known = subprocess.Popen(["sleep", "60"])
stopped = subprocess.Popen(["sleep", "60"])
stopped.send_signal(signal.SIGSTOP)
subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '61'], start_new_session=True)"])
assert len(descendants([known.pid])) >= 3
end_descendants([known.pid], term_seconds=0.5)
print(len(descendants([known.pid])), known.poll())
known.kill()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "None"], done.stderr


@pytest.mark.parametrize(
    ("command", "words"), [("exit 3", "exit code 3"), ("kill -9 $$", "SIGKILL"), ("sleep 60", None)]
)
def test_how_a_child_ended_is_told_and_can_still_be_waited_for(command: str, words: str | None) -> None:
    with subprocess.Popen(["sh", "-c", command]) as child:
        if words is None:
            assert end_of(child.pid) is None
            child.send_signal(signal.SIGSTOP)
            while not is_stopped(child.pid):
                time.sleep(0.01)
            child.kill()
        else:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert words in (end_of(child.pid) or "")
        assert child.wait() != 0


IMPORTED = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from rlpipe.__main__ import main
main()
"""


def test_an_interruption_while_the_command_line_is_imported_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT
    assert done.stdout + done.stderr == ""
