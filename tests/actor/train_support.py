"""What the tests of the training half share: tiny policies, packs, and processes that run many cases each."""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlpipe.shared.pack import Pack

VOCABULARY = 96
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "dtype": "float32",
}


def write_policy(folder: Path, architecture: str, layers: int = 4, **changes: int) -> Path:
    """A random tiny policy ("dense", "moe") in Hugging Face layout."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    common = {**_COMMON, "num_hidden_layers": layers, **changes}
    if architecture == "moe":
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **sizes, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=architecture == "tied"))
    path = folder / architecture
    model.save_pretrained(path)
    return path


def make_pack(lengths: Sequence[int], seed: int, denominator: float, multiple: int = 1) -> Pack:
    """Random tokens; each sequence is padded to `multiple`; all but its first two predictions are trained."""
    generator = np.random.default_rng(seed)
    padded = [-(-length // multiple) * multiple for length in lengths]
    total = sum(padded)
    ids, targets = np.zeros(total, np.int64), np.zeros(total, np.int64)
    mask, advantages, rollout = (np.zeros(total, np.float32) for _ in range(3))
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in padded])
    start = 0
    for length, room in zip(lengths, padded, strict=True):
        tokens = generator.integers(0, VOCABULARY, length)
        ids[start : start + length] = tokens
        targets[start : start + length - 1] = tokens[1:]
        mask[start + 2 : start + length - 1] = 1
        advantages[start : start + length] = generator.normal()
        rollout[start : start + length] = generator.normal(-4.5, 0.3, length)
        start += room
    return Pack(
        sample_ids=tuple(f"{seed}/{index}" for index in range(len(lengths))),
        token_ids=ids,
        targets=targets,
        position_ids=positions,
        loss_mask=mask,
        loss_weights=(mask / denominator).astype(np.float32),
        advantages=advantages * mask,
        rollout_logprobs=rollout * mask,
        cu_seqlens=(0, *np.cumsum(lengths).tolist()),
        cu_seqlens_padded=(0, *np.cumsum(padded).tolist()),
    )


def run_processes(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = 800,
    method: Literal["forkserver", "spawn"] | None = None,
) -> list[Any]:
    """`function(rank, count, *arguments)` in `count` fresh processes; their results in rank order.

    method: a server that has imported torch and Megatron, and done nothing else, saves most of the time; `spawn` is for
        measuring memory, and the default where there is CUDA, which cannot be used after a fork. Fails with the first
        process that fails.
    """
    import torch

    context: Any = multiprocessing.get_context(method or ("spawn" if torch.cuda.is_available() else "forkserver"))
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["tests.actor.worker_imports"])
    call = pickle.dumps((function, arguments))  # by value: a server passes few of the descriptors that tensors share
    answers, ports, leaving = context.Queue(), context.Queue(), context.Barrier(count)
    shared = (count, ports, answers, leaving, call)
    processes = [context.Process(target=_run, args=(rank, *shared)) for rank in range(count)]
    for process in processes:
        process.start()
    try:
        results = {}
        while len(results) < count:
            rank, value, failure = answers.get(timeout=timeout_seconds)
            assert failure is None, f"process {rank}:\n{failure}"
            results[rank] = value
    finally:
        for process in processes:
            process.join(10 if len(results) == count else 0)
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)  # its stacks tell what it waited for
                process.join(1)
                process.kill()
    return [results[rank] for rank in range(count)]


def _run(rank: int, count: int, ports: Any, answers: Any, leaving: Any, call: bytes) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    show_one_gpu(rank)
    try:
        import torch

        from actor import distributed
        from actor.megatron_patches.optimizer_fixes import install_optimizer_fixes
        from actor.megatron_patches.pipeline_fixes import install_pipeline_fixes
        from actor.runtime import install_megatron_runtime

        torch.set_num_threads(1)
        install_megatron_runtime()
        install_optimizer_fixes()
        install_pipeline_fixes()
        if rank == 0:
            store = distributed.open_store("127.0.0.1", count, 400)
            for _ in range(count - 1):
                ports.put(store.port)
        else:
            store = distributed.join_store("127.0.0.1", ports.get(timeout=400), count, 400)
        distributed.join_processes(store, rank, count, 400)
        function, arguments = pickle.loads(call)
        answers.put((rank, function(rank, count, *arguments), None))
        leaving.wait()  # torch's groups have no barrier: who leaves at once breaks those who are still joining
        distributed.leave()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))


def _end_with_parent() -> None:
    """Killed tests must not leave processes that hold a GPU and tens of gigabytes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def show_one_gpu(rank: int) -> None:
    """As Ray does for the actor's processes: of the GPUs that are visible here, and of those of the machine where
    nothing says which are; means nothing where there are no GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = [str(rank)] if visible is None else visible.split(",")[rank : rank + 1]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)


def in_train_worker(rank: int, count: int, name: str, *arguments: Any) -> Any:
    """Call a function of `train_workers`, which only workers import: it brings in Megatron."""
    return in_module_worker(rank, count, "train_workers", name, *arguments)


def in_module_worker(rank: int, count: int, module: str, name: str, *arguments: Any) -> Any:
    """Call a function of a module that only workers import."""
    return getattr(importlib.import_module(module), name)(rank, count, *arguments)
