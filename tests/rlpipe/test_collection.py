"""Python's garbage collector stands aside where it would find nothing, and is back after that."""

import gc
import pickle
import subprocess
import sys
import weakref

import pytest

from rlpipe.shared.collection import collect_everything, collection_paused, imports_kept, keep_what_lives
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


class _Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_what_lives_is_looked_at_no_more_until_everything_is():
    gone, put_aside = [weakref.ref(_Ring()) for _ in range(3)], _Ring()
    watched = weakref.ref(put_aside)
    try:
        keep_what_lives()
        assert not any(one() for one in gone)
        del put_aside
        later = weakref.ref(_Ring())
        gc.collect()
        assert watched() is not None and later() is None
        collect_everything()
        assert watched() is None and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    collect_everything()
    assert gc.get_freeze_count() == 0


def test_what_is_imported_is_neither_looked_at_meanwhile_nor_later():
    try:
        with imports_kept():
            assert not gc.isenabled()
            imported = weakref.ref(_Ring())
        assert gc.isenabled()
        later = weakref.ref(_Ring())
        gc.collect()
        assert imported() is not None and later() is None
    finally:
        collect_everything()
        gc.unfreeze()
    assert imported() is None


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
