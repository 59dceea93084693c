"""Python's garbage collector stands aside where it would find nothing, and is back after that."""

import gc
import pickle
import subprocess
import sys

import pytest

from rlpipe.shared.collection import collection_paused
from rollout.sglang_patches.scheduler_entry import SchedulerEntry


def test_the_collector_is_back_after_a_pause_unless_it_was_off_before():
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError), collection_paused():
        raise ValueError
    assert gc.isenabled()


def test_a_scheduler_s_process_pauses_the_collector_before_anything_large_is_imported():
    program = (
        "import gc, pickle, sys\n"
        f"entry = pickle.loads({pickle.dumps(SchedulerEntry())!r})\n"
        "print(callable(entry), gc.isenabled(), {'torch', 'sglang'} & set(sys.modules))\n"
        "pickle.dumps(entry)  # as a process does that starts others\n"
        "print(gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["True", "False", "set()", "True"]


def test_a_command_looks_for_no_garbage_as_it_ends():
    program = (
        "import atexit, gc\n"
        "from rlpipe.shared.collection import skip_collection_at_exit\n"
        "atexit.register(lambda: print('last', gc.get_freeze_count() > 1000))\n"
        "skip_collection_at_exit()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["last", "True"]
