"""Faults for test_phase_times.py, in every Python process that has this folder on its path.

Each training call compiles a kernel whose cache key never matches; in the planted iteration rank 1 is slow.
"""

import os
import time
from pathlib import Path
from typing import Any


def _plant(trainer_module: Any) -> None:
    import torch

    # What a compiler would do; that it is set here already is the point.
    Path(os.environ["TRITON_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
    trainer = trainer_module.Trainer
    train = trainer.train
    calls = iter(range(1_000_000))
    slow_call = int(os.environ["RLPIPE_TEST_SLOW_CALL"])

    def planted_kernel(x: Any, length: float) -> Any:
        return x * length

    def planted_train(self: Any, *args: Any) -> Any:
        call = next(calls)
        slow = call + 1 == slow_call and torch.distributed.get_rank() == 1
        hook = self.policy[0].register_forward_pre_hook(lambda *_: in_forward(call, slow))
        try:
            return train(self, *args)
        finally:
            hook.remove()

    def in_forward(call: int, slow: bool) -> None:
        time.sleep(1.5 if slow else 0.0)
        # The CPU stand-ins of Megatron switch compiling off.
        with torch._dynamo.config.patch(specialize_float=True), torch.compiler.set_stance("default"):
            compiled(torch.ones(2), 1.5 + call)

    import torch._dynamo

    compiled = torch.compile(planted_kernel, backend="eager", dynamic=False)
    trainer.train = planted_train


if "RLPIPE_TEST_SLOW_CALL" in os.environ:
    from rlpipe.jit_monitor.after_import import AfterImport

    AfterImport().call("actor.trainer", _plant)
