"""Drawing one token for each request of a decoding step: SGLang's sampler beside the kernels that take its place.

    python benchmarks/token_draw.py [--shapes 128x151936,128x248320,512x248320]      requests x vocabulary; needs a GPU

Both make a token and its log-probability of float32 logits. The floor is reading them once at the speed at which the
device copies.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from device_timing import copied_bytes_per_second, seconds_per_call

from rollout.sglang_patches import plain_draw

_ROUNDS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="128x151936,128x248320,512x248320", help="requests x vocabulary")
    shapes = parser.parse_args().shapes
    from sglang.srt.layers.sampler import Sampler

    copied = copied_bytes_per_second()
    theirs = Sampler.forward
    plain_draw.install()
    print(f"{torch.cuda.get_device_name()}, copying {copied / 1e12:.2f} TB/s")
    print(
        f"{'requests':>10}{'vocabulary':>12}{'floor ms':>10}{'SGLang ms':>11}{'passes':>8}{'ours ms':>9}{'passes':>8}"
    )
    for rows, columns in (map(int, shape.split("x")) for shape in shapes.split(",")):
        logits = 2 * torch.randn(rows, columns, device="cuda")
        floor = logits.numel() * logits.element_size() / copied
        seconds = [_seconds(forward, logits) for forward in (theirs, Sampler.forward)]
        shown = "".join(
            f"{one * 1e3:>{width}.3f}{one / floor:>8.1f}" for one, width in zip(seconds, (11, 9), strict=True)
        )
        print(f"{rows:>10}{columns:>12,}{floor * 1e3:>10.3f}{shown}", flush=True)


def _seconds(forward: Any, logits: torch.Tensor) -> float:
    """Of a draw, again and again from one tensor, in which SGLang's sampler leaves what it made of it."""
    taken, batch = sampler(), plain_batch(len(logits))
    return seconds_per_call(lambda: forward(taken, output_of(logits), batch, True, [0], [None], None), _ROUNDS)


def sampler() -> Any:
    """As SGLang makes it for a scheduler of one GPU."""
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
    from sglang.srt.layers.sampler import Sampler

    made = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(made)
    made.enable_deterministic, made.use_ascend_backend, made.use_log_softmax_logprob = False, False, False
    made.rl_on_policy_target, made.output_logprob_processor = None, OutputLogprobProcessor()
    return made


def plain_batch(rows: int) -> SimpleNamespace:
    """What SGLang notes of a batch of which no request leaves out a token."""
    return SimpleNamespace(
        is_all_greedy=False,
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
        has_custom_logit_processor=False,
        return_sampling_masks=None,
        sampling_seed=None,
        grammars=None,
        temperatures=torch.ones(rows, 1, device="cuda"),
    )


def output_of(logits: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(next_token_logits=logits)


if __name__ == "__main__":
    main()
