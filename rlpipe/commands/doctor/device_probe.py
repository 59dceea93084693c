"""What the doctor tries in a process of its own.

    python -m rlpipe.commands.doctor.device_probe gpu | gdn BACKEND | all_reduce

Prints one line of JSON; ends with another exit code than 0, and the reason as its last line, where it does not work.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

_REPEATS = 5


def main(arguments: list[str]) -> None:
    probes: dict[str, Callable[..., dict[str, Any]]] = {"gpu": _gpu, "gdn": _gdn, "all_reduce": _all_reduce}
    probe = probes[arguments[0]]
    print(json.dumps(probe(*arguments[1:])))


def _gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"found": f"CPU, torch {torch.__version__}"}
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    major, minor = torch.cuda.get_device_capability()
    built = (
        f"sm_{major}{minor}" in torch.cuda.get_arch_list() or f"compute_{major}{minor}" in torch.cuda.get_arch_list()
    )
    product = torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda")
    if float(product[0, 0]) != 256.0:
        raise SystemExit("a matrix product on the GPU is wrong")
    native = "" if built else ", through PTX: torch has no code of its own for it"
    count = torch.cuda.device_count()
    return {"found": f"{count} x {', '.join(names)}, sm_{major}{minor}, CUDA {torch.version.cuda}{native}"}


def _gdn(backend: Literal["auto", "torch", "fla", "flashqla"]) -> dict[str, Any]:
    """Forward and backward of the delta rule on two short sequences, compared with plain torch."""
    import torch

    from actor.layers.gdn_backend import choose_gdn_backend
    from actor.layers.gdn_kernels import load_kernels
    from actor.layers.gdn_torch import chunked_delta_rule, unit_heads
    from actor.layers.packed import PackedSequences
    from rlpipe.model.description import GatedDeltaNetSizes
    from rlpipe.shared.errors import RlpipeError

    sizes = GatedDeltaNetSizes(
        key_heads=4, value_heads=8, key_dim=128, value_dim=128, conv_width=4, fused_projections=False
    )
    dtype_name = "bfloat16" if torch.cuda.is_available() else "float32"
    try:
        kernels = load_kernels(choose_gdn_backend(backend, sizes, dtype_name).backend)
    except RlpipeError as reason:
        raise SystemExit(str(reason)) from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, dtype_name)
    sequences = PackedSequences(qkv_format="thd", ends=(0, 100, 256), device=device)
    torch.manual_seed(0)
    shapes = ((4, 128), (4, 128), (8, 128), (8,), (8,))
    inputs = [torch.randn(256, *shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    query, key, value, decay, beta = inputs
    gates = -decay.float().exp(), beta.float().sigmoid()
    heads = unit_heads(query), unit_heads(key), value
    out = kernels.delta_rule(*heads, *gates, sequences)
    out.float().square().mean().backward()
    expected = chunked_delta_rule(*heads, *gates, sequences)
    error = float((out - expected).detach().float().norm() / expected.detach().float().norm())
    gradients = [tensor.grad for tensor in inputs]
    if error > 0.02 or not all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients):
        raise SystemExit(f"{kernels.backend} differs from plain torch by {error:.1e}, or its gradients are not finite")
    return {"found": f"{kernels.backend}, forward and backward, {error:.1e} from plain torch"}


def _all_reduce() -> dict[str, Any]:
    """Over all GPUs of this node by NCCL, or two processes by Gloo."""
    import torch
    import torch.multiprocessing as multiprocessing

    gpus = torch.cuda.device_count()
    count = gpus or 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    size = 256 * 2**20 if gpus else 2**20
    multiprocessing.spawn(_reduce, (count, port, size, answers), nprocs=count)
    seconds = answers.get()
    speed = 2 * (count - 1) / count * size / seconds / 1e9
    kind = "NCCL" if gpus else "Gloo"
    found = f"{kind}, {count} processes, {size / 2**20:.0f} MiB: {seconds * 1e3:.2f} ms, {speed:.1f} GB/s of bus"
    return {"found": found, "gigabytes_per_second": speed, "gpus": gpus}


def _reduce(rank: int, count: int, port: int, size: int, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=count)
    values = torch.ones(size // 4, device="cuda" if gpu else "cpu")
    dist.all_reduce(values)
    if float(values[-1]) != count:
        raise SystemExit(f"rank {rank}: the sum is {float(values[-1])}, not {count}")
    start = _now(gpu)
    for _ in range(_REPEATS):
        dist.all_reduce(values)
    seconds = (_now(gpu) - start) / _REPEATS
    if rank == 0:
        answers.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def _now(gpu: bool) -> float:
    if gpu:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main(sys.argv[1:])
