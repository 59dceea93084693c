"""Hooks into libraries that need a GPU, against stand-ins with the same module, class and method names."""

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlpipe.jit_monitor import JitMonitor
from rlpipe.jit_monitor.after_import import AfterImport

ROOT = Path(__file__).parents[2]

STAND_INS = {
    "tilelang/__init__.py": "",
    "tilelang/jit/__init__.py": """
        from tilelang.jit.kernel import JITKernel

        class JITImpl:
            def __init__(self, func):
                self.func = func

            def compile(self, from_database=False):
                return JITKernel(PrimitiveFunction(self.func.__name__), from_database=from_database)

        class PrimitiveFunction:
            def __init__(self, name):
                self.attrs = {"global_symbol": name + "_kernel"}
    """,
    "tilelang/jit/kernel.py": """
        class JITKernel:
            def __init__(self, func=None, out_idx=None, from_database=False):
                self.func = func
    """,
    "cutlass/__init__.py": "",
    "cutlass/base_dsl/__init__.py": "",
    "cutlass/base_dsl/compiler.py": """
        class CompileCallable:
            def __call__(self, *args, **kwargs):
                return self._compile(*args, **kwargs)

            def _compile(self, func, *args, **kwargs):
                return func
    """,
    "flashinfer/__init__.py": "",
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/core.py": """
        class JitSpec:
            def __init__(self, name, jit_library_path):
                self.name, self.jit_library_path = name, jit_library_path

            def build(self, verbose, need_lock=True):
                if not self.jit_library_path.exists():
                    self.jit_library_path.write_text("machine code")
    """,
}

TRITON_STAND_IN = {
    "triton/__init__.py": "",
    "triton/knobs.py": """
        from types import SimpleNamespace
        compilation = SimpleNamespace(listener=None)
    """,
    "triton/runtime/__init__.py": "",
    "triton/runtime/autotuner.py": """
        from types import SimpleNamespace
        from triton import knobs

        class Autotuner:
            def __init__(self, base_fn):
                self.base_fn, self.cache, self.fn = base_fn, {}, Kernel(base_fn.__name__)

            def run(self, key):
                if key not in self.cache:
                    for configuration in self.prune_configs({}):
                        self._bench(key, config=configuration, grid=1, warmup=False)
                    self.cache[key] = "best"

            def prune_configs(self, kwargs):
                return [Configuration(number) for number in range(2)]

            def _bench(self, *args, config, **meta):
                self.fn.run(*args, **meta, **config.all_kwargs())

        class Configuration:
            def __init__(self, number):
                self.number = number

            def __str__(self):
                return str(self.number)

            def all_kwargs(self):
                return {"number": self.number}

        class Kernel:
            def __init__(self, name):
                self.name, self.compiled = name, set()

            def run(self, key, number, grid, warmup):
                if (key, number) in self.compiled:
                    return
                self.compiled.add((key, number))
                knobs.compilation.listener(
                    src=None,
                    metadata={"name": self.name, "hash": f"hash{number}{' only' if warmup else ''}"},
                    metadata_group={},
                    times=SimpleNamespace(total=250),
                    cache_hit=number == 1,
                )
    """,
    "triton/runtime/_async_compile.py": """
        from contextlib import contextmanager

        @contextmanager
        def AsyncCompileMode(executor, *, ignore_errors=False):
            yield
    """,
}


def _write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.fixture
def monitor():
    monitor = JitMonitor.install()
    yield monitor
    monitor.uninstall()


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    roots = {name.split("/")[0] for name in STAND_INS}
    if any(importlib.util.find_spec(root) for root in roots):
        pytest.skip("the real libraries are installed")
    _write(tmp_path, STAND_INS)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in roots]:
        del sys.modules[name]


def test_tilelang_kernels_are_compiled_or_loaded(monitor, stand_ins):
    tilelang = importlib.import_module("tilelang.jit")

    def chunk_forward(): ...

    implementation = tilelang.JITImpl(chunk_forward)
    assert implementation.compile().func is not None
    implementation.compile(from_database=True)
    events = [(event.name, event.compiled, event.within) for event in monitor.drain().events]
    assert events == [
        ("chunk_forward_kernel", True, "tilelang"),
        ("chunk_forward", False, ""),
        ("chunk_forward_kernel", False, "tilelang"),
        ("chunk_forward", False, ""),
    ]


def test_every_cute_compilation_is_one(monitor, stand_ins):
    compiler = importlib.import_module("cutlass.base_dsl.compiler").CompileCallable()

    def flash_attention_backward(): ...

    assert compiler(flash_attention_backward, 1) is flash_attention_backward
    compiler(flash_attention_backward, 1)
    events = monitor.drain().events
    assert [(event.kind, event.name, event.compiled) for event in events] == [
        ("cute_dsl", "flash_attention_backward", True)
    ] * 2


def test_flashinfer_builds_only_what_is_missing(monitor, stand_ins):
    spec = importlib.import_module("flashinfer.jit.core").JitSpec("prefill_bf16", stand_ins / "prefill.so")
    spec.build(verbose=False)
    spec.build(False, need_lock=False)
    events = monitor.drain().events
    assert [(event.name, event.compiled) for event in events] == [("prefill_bf16", True), ("prefill_bf16", False)]


@pytest.mark.skipif(not (shutil.which("ninja") and shutil.which("c++")), reason="needs ninja and a C++ compiler")
def test_tvm_ffi_builds_only_what_is_missing(monitor, tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path))
    extension = importlib.import_module("tvm_ffi.cpp.extension")
    for _ in range(2):
        module = extension.load_inline("add_one", cpp_sources="int one(int x) { return x + 1; }", functions=["one"])
        assert module.one(3) == 4
    (folder,) = tmp_path.iterdir()
    events = monitor.drain().events
    assert [(event.kind, event.name, event.compiled) for event in events] == [
        ("tvm_ffi", folder.name, True),
        ("tvm_ffi", folder.name, False),
    ]


def test_uninstalling_gives_the_methods_back(stand_ins):
    monitor = JitMonitor.install()
    module = importlib.import_module("cutlass.base_dsl.compiler")
    hooked = module.CompileCallable._compile
    monitor.uninstall()
    assert module.CompileCallable._compile is hooked.__wrapped__
    importlib.import_module("flashinfer.jit.core")
    assert not any(isinstance(finder, AfterImport) for finder in sys.meta_path)


def test_a_library_with_another_inside_is_named(monitor, tmp_path, monkeypatch, caplog):
    if importlib.util.find_spec("cutlass"):
        pytest.skip("the real library is installed")
    _write(tmp_path, STAND_INS | {"cutlass/base_dsl/compiler.py": "class Compiler: ..."})
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("cutlass.base_dsl.compiler")
    assert "CompileCallable" in monitor.unattached["cutlass.base_dsl.compiler"]
    assert "compilations by cutlass.base_dsl.compiler cannot be seen" in caplog.text
    for name in ("cutlass.base_dsl.compiler", "cutlass.base_dsl", "cutlass"):
        del sys.modules[name]


def test_modules_keep_their_loader(stand_ins):
    watch, seen = AfterImport(), []
    watch.call("flashinfer.jit.core", seen.append)
    try:
        module = importlib.import_module("flashinfer.jit.core")
    finally:
        watch.remove()
    assert seen == [module]
    assert module.__spec__.loader.get_source("flashinfer.jit.core").strip().startswith("class JitSpec")
    watch.call("flashinfer.jit.core", seen.append)
    assert seen == [module, module]


def _in_a_process(code, python_path):
    """Triton is imported by torch too, so neither it nor a stand-in enters pytest's own process."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{python_path}", "TRITON_CACHE_DIR": str(python_path / "cache"), "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_triton_autotuning_contains_its_compilations_and_compiles_all_candidates_first(tmp_path):
    _write(tmp_path, TRITON_STAND_IN)
    events = _in_a_process(
        """
        import json
        from rlpipe.jit_monitor import JitMonitor
        monitor = JitMonitor.install()
        from triton.runtime.autotuner import Autotuner
        def l2_norm(): ...
        tuner = Autotuner(l2_norm)
        for key in (2048, 2048, 4096):
            tuner.run(key)
        report = monitor.drain()
        print(json.dumps([[e.kind, e.name, e.key, e.compiled, e.within, e.seconds < 0.1] for e in report.events]))
        """,
        tmp_path,
    )
    one_run = [
        ["triton", "l2_norm", "hash0 only", True, "triton_autotune", True],
        ["triton", "l2_norm", "hash1 only", False, "triton_autotune", True],
        ["triton_autotune", "l2_norm", "2 candidates", False, "triton_autotune", True],
        ["triton_autotune", "l2_norm", "0", True, "", True],
        ["triton_autotune", "l2_norm", "1", False, "", True],
    ]
    assert events == one_run * 2


def test_without_a_second_core_candidates_compile_one_by_one(tmp_path):
    _write(tmp_path, TRITON_STAND_IN)
    events = _in_a_process(
        """
        import json, os
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        from rlpipe.jit_monitor import JitMonitor
        monitor = JitMonitor.install()
        from triton.runtime.autotuner import Autotuner
        def l2_norm(): ...
        Autotuner(l2_norm).run(2048)
        print(json.dumps([[e.kind, e.key] for e in monitor.drain().events]))
        """,
        tmp_path,
    )
    assert events == [["triton", "hash0"], ["triton_autotune", "0"], ["triton", "hash1"], ["triton_autotune", "1"]]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which CPU images do not have")
def test_real_triton_compiles_without_a_gpu(tmp_path):
    kernel = tmp_path / "planted_kernel.py"
    kernel.write_text(
        textwrap.dedent(
            """
            import triton
            import triton.language as tl

            @triton.jit
            def planted_kernel(pointer, length: tl.constexpr):
                tl.store(pointer, length)
            """
        )
    )
    events = _in_a_process(
        """
        import json
        from rlpipe.jit_monitor import JitMonitor
        monitor = JitMonitor.install()
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from planted_kernel import planted_kernel
        for length in (5, 5, 6):
            source = ASTSource(planted_kernel, {"pointer": "*i32", "length": "constexpr"}, {(1,): length})
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert not monitor.unattached, monitor.unattached
        print(json.dumps([[e.kind, e.name, e.compiled] for e in monitor.drain().events]))
        """,
        tmp_path,
    )
    assert events == [["triton", "planted_kernel", compiled] for compiled in (True, False, True)]
