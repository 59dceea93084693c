"""Block sizes of SGLang's fused MoE kernel that were measured here, for GPUs and shapes that SGLang has none of.

`benchmarks/tune_moe.py` writes them into rollout/moe_kernel_blocks. With SGLang's own sizes a layer of Qwen3.5-35B-A3B
takes about as long for the few tokens of a small batch, and 1.4 to 1.7 times as long from 384 tokens on; with experts
in 8 bits 1.1 to 1.3 times as long for any batch.
"""

import os
from pathlib import Path

from rlpipe.shared.replaced_parts import relies_on
from rollout.sglang_source import sglang_folder

relies_on(
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config:get_moe_configs",
    texts=('"SGLANG_MOE_CONFIG_DIR"', '"configs"', 'f"triton_{triton_version'),
    why="its folder of block sizes is replaced by one that has ours beside its own",
    drop_when="SGLang ships sizes for the models that are trained here",
)

_VARIABLE = "SGLANG_MOE_CONFIG_DIR"
_MEASURED = Path(__file__).resolve().parent / "moe_kernel_blocks" / "configs"
_OF_SGLANG = Path("srt/layers/moe/moe_runner/triton_utils/configs")


def use_measured_blocks(folder: Path) -> None:
    """Lets SGLang, started by this process later, find the files of this package before its own. The user's choice by
    SGLang's environment variable stays.

    folder: where links to both may lie for as long as the engine lives.
    """
    if _VARIABLE in os.environ:
        return
    for source in (_MEASURED, sglang_folder() / _OF_SGLANG):
        for file in source.glob("triton_*/*.json"):
            link = folder / "configs" / file.parent.name / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(file)
    os.environ[_VARIABLE] = str(folder)
