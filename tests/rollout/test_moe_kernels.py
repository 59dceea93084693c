"""SGLang finds the block sizes that were measured here, and its own where there are none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.moe_kernels import use_measured_blocks
from rollout.sglang_source import sglang_folder
from tests.search_path import search_path

VARIABLE = "SGLANG_MOE_CONFIG_DIR"
MEASURED = "triton_3_6_0/E=256,N=512,device_name=NVIDIA_H200.json"
IN_8_BITS = "triton_3_6_0/E=256,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]"
OF_SGLANG = "triton_3_2_0/E=128,N=768,device_name=NVIDIA_H200.json"
LOOK = """
import json, sys, triton
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as module

triton.__version__ = "3.6.0"
module.get_device_name = lambda: "NVIDIA H200"
module.get_exec = lambda: type("Exec", (), {"deterministic": type("No", (), {"enable_deterministic_inference": False})})
found = [module.get_moe_configs(*shape, None) for shape in ((256, 512), (128, 768), (7, 7))]
found += [module.get_moe_configs(256, 512, "fp8_w8a8", 128, 128, down_moe=down) for down in (False, True)]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_measured_blocks_come_before_those_of_sglang(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    use_measured_blocks(tmp_path)
    monkeypatch.setenv(VARIABLE, os.environ[VARIABLE])  # which is undone afterwards
    configs = tmp_path / "configs"
    assert (configs / MEASURED).resolve().is_relative_to(Path(use_measured_blocks.__code__.co_filename).parent)
    assert (configs / OF_SGLANG).resolve().is_relative_to(sglang_folder())

    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr
    measured, of_sglang, nothing, first, second = json.loads(done.stdout.splitlines()[-1])
    assert measured == json.loads((configs / MEASURED).read_text())
    assert of_sglang == json.loads((configs / OF_SGLANG).read_text())
    assert nothing is None
    assert first == json.loads((configs / f"{IN_8_BITS}.json").read_text())
    assert second == json.loads((configs / f"{IN_8_BITS}_down.json").read_text())


def test_the_users_folder_stays(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "/of/the/user")
    use_measured_blocks(tmp_path)
    assert os.environ[VARIABLE] == "/of/the/user" and not list(tmp_path.iterdir())


def test_measured_blocks_are_whole():
    folder = Path(use_measured_blocks.__code__.co_filename).parent / "moe_kernel_blocks"
    files = list(folder.glob("configs/triton_*/*.json"))
    assert files
    for file in files:
        for tokens, blocks in json.loads(file.read_text()).items():
            assert int(tokens) > 0 and set(blocks) - {"USE_TMA"} == {
                *("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
            }
            assert "USE_TMA" not in blocks or file.stem.endswith("_down")  # SGLang passes it on for the second product
            assert "block_shape" not in file.name or 128 % blocks["BLOCK_SIZE_K"] == 0  # one scale a step


def test_both_products_of_8_bit_experts_sort_their_tokens_once():
    folder = Path(use_measured_blocks.__code__.co_filename).parent / "moe_kernel_blocks"
    seconds = list(folder.glob("configs/triton_*/*_down.json"))
    assert seconds
    for file in seconds:
        first, second = (
            {tokens: blocks["BLOCK_SIZE_M"] for tokens, blocks in json.loads(one.read_text()).items()}
            for one in (file.with_name(file.name.replace("_down", "")), file)
        )
        assert first == second


def _environment() -> dict[str, str]:
    stand_ins = Path(use_measured_blocks.__code__.co_filename).parent / "cpu_stand_ins"
    path = search_path(stand_ins)
    return os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}
