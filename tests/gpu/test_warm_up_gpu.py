"""What the warm-up promises on a GPU: candidates compile together and once, runs not at all."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: elsewhere kernels are not compiled", allow_module_level=True)

import triton
import triton.language as tl
from run_support import UNTRACKED, metric_rows, run_arguments, run_command

from rlpipe.jit_monitor import JitMonitor
from rlpipe.jit_monitor.hooks.parallel_tuning import compiling_only


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128, 256) for warps in (1, 2, 4)],
    key=["classes"],
)
@triton.jit
def _doubled(x, y, tokens, classes, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < tokens), mask=at < tokens)


def _double(x: torch.Tensor, y: torch.Tensor, classes: int) -> None:
    _doubled[lambda meta: (triton.cdiv(len(x), meta["BLOCK"]),)](x, y, len(x), classes)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_candidates_compile_once_all_before_the_first_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    monitor = JitMonitor.install()
    try:
        _double(x, y, classes=1)
        events = [event for event in monitor.drain().events if event.name == "_doubled"]
    finally:
        monitor.uninstall()
    torch.testing.assert_close(y, 2 * x)
    assert sum(event.kind == "triton" and event.compiled for event in events) == 9
    first_measured = next(index for index, event in enumerate(events) if "BLOCK" in event.key)
    assert sum(event.kind == "triton" for event in events[:first_measured]) == 9


def test_candidates_can_be_compiled_without_tuning_and_tuned_without_compiling(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    x = torch.randn(1000, device="cuda")
    y = torch.zeros_like(x)
    _doubled.cache.clear()
    monitor = JitMonitor.install()
    try:
        with compiling_only(monitor.recorder):
            _double(x, y, classes=2)
        compiled = [event for event in monitor.drain().events if event.kind == "triton" and event.compiled]
        assert _doubled.cache == {}
        assert (y == 0).all()
        _double(x, y, classes=2)
        later = [event for event in monitor.drain().events if event.kind == "triton" and event.compiled]
    finally:
        monitor.uninstall()
    assert (len(compiled), len(later)) == (9, 0)
    assert len(_doubled.cache) == 1
    torch.testing.assert_close(y, 2 * x)


@pytest.mark.timeout(900)
def test_a_hybrid_run_of_random_lengths_compiles_nothing_after_its_warm_up(tmp_path):
    pytest.importorskip("fla", reason="needs FLA: plain torch compiles nothing")
    settings = [
        f"model.path={tmp_path}/hybrid-policy",
        "run.iterations=3",
        "ray.colocate=true",
        "actor.dtype=bfloat16",
        "rollout.engine.dtype=bfloat16",
        "rollout.engine.memory_fraction=0.3",
        "rollout.engine.max_running_requests=64",
        "rollout.engine.deterministic=false",
        "jit.warmup_iterations=0",
        "jit.after_warmup=error",
        *UNTRACKED,
    ]
    run_command("train", *run_arguments(tmp_path, *settings, config="configs/demo/hybrid.yaml"))
    rows = metric_rows(tmp_path / "small")
    assert [row["perf/jit_compiles"] for row in rows[1:]] == [0, 0, 0]
    assert rows[0]["start/engine_warm_up_seconds"] > 0
