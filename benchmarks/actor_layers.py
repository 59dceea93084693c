"""The actor's layers alone: TFLOP/s of forward and backward over one pack, without head, loss and optimizer.

    python benchmarks/actor_layers.py [--backend fla] [--packs 4x2048,1x8192] [--profile] [--eager] [--tiny]
                                      [--model Qwen3-0.6B] [--gradients FILE]

On a GPU: 8 layers of Qwen3.5-35B-A3B (6 Gated DeltaNet, 2 softmax attention, 256 experts) in bfloat16 with random
weights; elsewhere tiny ones in float32. Model FLOPs count the causal half (docs/flops.md) and no head. The ceiling is
what a large matrix product reaches on the same device in the same run.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from device_timing import copied_bytes_per_second, product_flops_per_second
from kernel_groups import print_groups, profiled
from layer_floors import layer_floors
from layer_passes import lengths_of, policy_layers
from layer_shapes import hybrid_config, random_pack, text_model, tiny_model
from whole_step_setup import MODELS

from actor.device import compute_device, device_name, synchronize
from actor.distributed import join_processes, leave, start_model_parallel
from actor.layers.packed import PackInputs, pack_to_device
from actor.models.policy_model import PolicyModel
from actor.runtime import install_megatron_runtime
from rlpipe.config.actor import ActorConfig
from rlpipe.flops import Part, model_flops
from rlpipe.jit_monitor import JitMonitor
from rlpipe.model.model_reader import describe_model

_LAYERS = 8
_VOCABULARY = 1024  # only embeddings depend on it
_SHOWN_NORMS = 8


@dataclass(frozen=True)
class Sizes:
    """What is measured. `ceiling` is the side of the matrix product."""

    tiny: bool
    packs: str
    dtype: Literal["float32", "bfloat16"]
    ceiling: int


ON_GPU = Sizes(tiny=False, packs="4x2048,1x8192,2x8192,4x8192,1x32768", dtype="bfloat16", ceiling=8192)
ELSEWHERE = Sizes(tiny=True, packs="4x64,1x256", dtype="float32", ceiling=512)


@dataclass(frozen=True)
class Measured:
    """Of one pack. Seconds of a forward and backward pass: of the first, and the median of the later ones."""

    first_seconds: float
    seconds: float
    peak_bytes: int


def main() -> None:
    options = _options()
    sizes = ON_GPU if torch.cuda.is_available() and not options.tiny else ELSEWHERE
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")  # it prints among the table's lines
    JitMonitor.install()  # the candidates of a tuning run compile together, as in a training run
    install_megatron_runtime()
    if options.eager:
        torch.compiler.set_stance("force_eager")
    join_processes(dist.HashStore(), 0, 1, timeout_seconds=600)
    actor = ActorConfig(dtype=sizes.dtype, gdn_backend=options.backend, threads=1)
    start_model_parallel(actor, seed=0)
    config = _model(options.model, sizes.tiny)
    policy = policy_layers(config, actor)
    shape = describe_model(config).shape
    ceiling = product_flops_per_second(sizes.ceiling, getattr(torch, sizes.dtype)) / 1e12
    copied = copied_bytes_per_second()
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    layers = len(policy.decoder.layers)
    print(f"{device_name() or 'CPU'}, {sizes.dtype}, {layers} layers, {parameters / 1e9:.2f} B parameters")
    compiled = torch.cuda.is_available() and not options.eager
    print(f"{_gdn_kernels(policy)}element-wise functions {'compiled' if compiled else 'eager'}")
    print(f"ceiling: {ceiling:,.1f} TFLOP/s ({sizes.ceiling}^3 matrix product), copying {copied / 1e12:.2f} TB/s")
    print(f"{'pack':>10}{'first s':>10}{'ms':>10}{'TFLOP/s':>10}{'of ceiling':>12}{'tokens/s':>12}{'peak GB':>10}")
    for lengths in lengths_of(options.packs or sizes.packs):
        inputs = pack_to_device(random_pack(lengths, _VOCABULARY), compute_device())
        flops = model_flops(shape, lengths)
        of_layers = 3 * sum(work.forward for part, work in flops.parts if part is not Part.HEAD)
        _report(lengths, _measure(policy, inputs, options.rounds), of_layers / 1e12, ceiling)
        if options.gradients:
            _compare_norms(policy, f"{len(lengths)}x{lengths[0]}", options.gradients)
        if options.profile:
            print(layer_floors(shape, lengths, ceiling * 1e12, copied).line())
            print_groups(profiled(partial(_pass, policy, inputs)).times, options.shown_share)
    leave()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("auto", "fla", "flashqla", "torch"), default="auto")
    parser.add_argument("--model", default="", help="a whole model of configs/models instead")
    parser.add_argument("--packs", help="sequences x tokens, for instance 4x2048,1x8192")
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each pack")
    parser.add_argument("--profile", action="store_true", help="time by kind of kernel for each pack")
    parser.add_argument("--shown-share", type=float, default=0.05, help="of all time, for a kernel's own line")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--tiny", action="store_true", help="small layers and packs, as on a CPU")
    parser.add_argument("--gradients", type=Path, help="keeps norms of gradients there, or compares with those kept")
    return parser.parse_args()


def _model(name: str, tiny: bool) -> dict[str, Any]:
    """`config.json`, of a small vocabulary, since no head is computed."""
    if not name:
        return hybrid_config(_LAYERS, _VOCABULARY, tiny)
    whole = text_model(json.loads((MODELS / name / "config.json").read_text())) | {"vocab_size": _VOCABULARY}
    return tiny_model(whole) if tiny else whole


def _gdn_kernels(policy: PolicyModel) -> str:
    """Begins the line of what runs how."""
    mixer = policy.decoder.layers[0].self_attention
    return f"Gated DeltaNet on {mixer.kernels.backend}; " if hasattr(mixer, "kernels") else ""


def _pass(policy: PolicyModel, inputs: PackInputs) -> None:
    """Forward and backward; the gradient of the hidden states is the embedding of the tokens.

    The hidden states themselves would not do: the last norm sets their length, so all gradients would be rounding.
    """
    for parameter in policy.parameters():
        parameter.grad = None
    hidden = policy(inputs)
    hidden.backward(policy.embedding.word_embeddings.weight.detach()[inputs.targets].view_as(hidden))
    synchronize()


def _compare_norms(policy: PolicyModel, pack: str, path: Path) -> None:
    """Of the last pass: kept under the pack's name, or beside those of another tree or backend, worst first."""
    norms = {name: float(one.grad.float().norm()) for name, one in policy.named_parameters() if one.grad is not None}
    kept = json.loads(path.read_text()) if path.exists() else {}
    if pack not in kept:
        path.write_text(json.dumps(kept | {pack: norms}))
        return
    differences = {name: abs(norm - kept[pack][name]) / kept[pack][name] for name, norm in norms.items()}
    print("  largest differences between norms of gradients:")
    for name in sorted(differences, key=lambda name: -differences[name])[:_SHOWN_NORMS]:
        print(f"      {differences[name]:9.2e} {kept[pack][name]:12.5e} then {norms[name]:12.5e} now  {name}")


def _measure(policy: PolicyModel, inputs: PackInputs, rounds: int) -> Measured:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    first = _seconds(lambda: _pass(policy, inputs))
    _pass(policy, inputs)
    later = [_seconds(lambda: _pass(policy, inputs)) for _ in range(rounds)]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return Measured(first, median(later), peak)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _report(lengths: tuple[int, ...], measured: Measured, tera_flops: float, ceiling: float) -> None:
    name, speed = f"{len(lengths)}x{lengths[0]}", tera_flops / measured.seconds
    print(
        f"{name:>10}{measured.first_seconds:10.1f}{measured.seconds * 1e3:10.1f}{speed:10.2f}{speed / ceiling:12.1%}"
        f"{sum(lengths) / measured.seconds:12,.0f}{measured.peak_bytes / 1e9:10.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
