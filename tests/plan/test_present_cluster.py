"""This machine as nvidia-smi tells of it, by one of our own."""

import os
import sys

import pytest

from rlpipe.commands.clusters import load_cluster
from rlpipe.commands.doctor.node_facts import read_gpus
from rlpipe.estimate import present_cluster
from rlpipe.estimate.present_cluster import host_memory_bytes, visible_gpus
from rlpipe.shared.errors import ResourceError


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts a program in the place of nvidia-smi."""

    def put(text, mode=0o755):
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(mode)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return put


def test_gpus_without_memory_of_their_own_take_the_machines(smi):
    smi("echo 'NVIDIA H200, 143771'; echo 'NVIDIA GB10, [N/A]'")
    assert visible_gpus() == [("NVIDIA H200", 143771 * 2**20), ("NVIDIA GB10", host_memory_bytes())]
    smi("echo '580.1, NVIDIA GB10, 12.1, [N/A]'")
    assert [(gpu.name, gpu.used_bytes) for gpu in read_gpus()] == [("NVIDIA GB10", 0)]


def test_a_program_that_hangs_is_told_and_one_that_fails_is_none(smi, monkeypatch):
    smi("echo no driver; exit 9")
    assert visible_gpus() == [] and read_gpus() == ()
    smi("exec sleep 1000")
    monkeypatch.setattr(present_cluster, "_SMI_SECONDS", 0.1)
    with pytest.raises(ResourceError, match="nvidia-smi has not answered for 0.1 seconds"):
        visible_gpus()


@pytest.mark.parametrize("library", [False, True])
def test_attention_is_planned_with_the_kernels_that_are_installed(library, smi, tmp_path, monkeypatch):
    smi('case "$1" in *compute_cap*) echo 9.0;; *) echo "NVIDIA H200, 143771";; esac')
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").touch()
    if library:
        (package / "flash_ops.abi3.so").touch()
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    speeds = load_cluster("local_8x141gb").speeds
    expected = speeds.attention_share_of_bandwidth if library else speeds.triton_attention_share_of_bandwidth
    assert expected > 0.8 if library else expected < 0.7
    assert present_cluster.present_cluster().speeds.attention_share_of_bandwidth == expected
