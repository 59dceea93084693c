"""Hooks of the JIT monitor on the installed TileLang, CUTLASS DSL and FlashInfer, which compile a kernel each."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: only there these compilers are used"
)

ROOT = Path(__file__).parents[2]
_PRINT_EVENTS = """
report = monitor.drain()
assert not monitor.unattached, monitor.unattached
print("EVENTS", json.dumps([[e.kind, e.name, e.compiled, e.seconds] for e in report.events]))
"""

TILELANG = """
import tilelang
import tilelang.language as T

@tilelang.jit(out_idx=[-1])
def add_one(length):
    @T.prim_func
    def planted_kernel(x: T.Tensor((length,), "float32"), y: T.Tensor((length,), "float32")):
        with T.Kernel(T.ceildiv(length, 128), threads=128) as block:
            for i in T.Parallel(128):
                y[block * 128 + i] = x[block * 128 + i] + 1.0
    return planted_kernel

x = torch.arange(1024, device="cuda", dtype=torch.float32)
torch.testing.assert_close(add_one(1024)(x), x + 1)
"""

CUTE_DSL = """
import cutlass
import cutlass.cute as cute

@cute.kernel
def planted_kernel():
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.printf("planted")

@cute.jit
def launch_planted():
    planted_kernel().launch(grid=(1, 1, 1), block=(32, 1, 1))

torch.cuda.init()
for _ in range(2):
    cute.compile(launch_planted)
"""

FLASHINFER = """
from pathlib import Path
from flashinfer.jit.core import gen_jit_spec

source = Path(__file__).with_name("planted.cu")
source.write_text('extern "C" int planted() { return 1; }')
for _ in range(2):
    gen_jit_spec("planted", [source]).build(verbose=False)
"""


def _events(folder: Path, code: str) -> list[list]:
    """Of a fresh process that installs the monitor before the library is imported, with caches in `folder`."""
    program = folder / "planted_program.py"
    head = "import json\nfrom rlpipe.jit_monitor import JitMonitor\nmonitor = JitMonitor.install()\nimport torch\n"
    program.write_text(head + textwrap.dedent(code) + _PRINT_EVENTS)
    caches = {"TILELANG_CACHE_DIR": str(folder / "tilelang"), "FLASHINFER_WORKSPACE_BASE": str(folder)}
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **caches,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("EVENTS ")]
    return json.loads(line.removeprefix("EVENTS "))


def _needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_a_tilelang_kernel_is_compiled_once_and_then_comes_from_the_disk(tmp_path):
    _needs("tilelang")
    compiled = [[e for e in _events(tmp_path, TILELANG) if e[0] == "tilelang" and e[2]] for _ in range(2)]
    ((_, name, _, seconds),) = compiled[0]
    assert "planted_kernel" in name and seconds > 0
    assert compiled[1] == []


def test_every_compilation_of_cute_dsl_is_seen_by_its_function(tmp_path):
    _needs("cutlass")
    events = [event for event in _events(tmp_path, CUTE_DSL) if event[0] == "cute_dsl"]
    assert len(events) == 2 and all("launch_planted" in name and seconds > 0 for _, name, _, seconds in events)


def test_flashinfer_builds_what_is_missing_and_nothing_else(tmp_path):
    _needs("flashinfer")
    events = [event for event in _events(tmp_path, FLASHINFER) if event[0] == "flashinfer"]
    assert [(name, compiled) for _, name, compiled, _ in events] == [("planted", True), ("planted", False)]
    assert events[0][3] > events[1][3]
