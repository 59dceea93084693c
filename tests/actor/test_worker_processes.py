"""Processes that tests start see one GPU each, and none where GPUs are hidden from the tests."""

import os

import pytest
from train_support import show_one_gpu


@pytest.mark.parametrize(
    ("visible", "seen"), [("", ["", ""]), ("2", ["2", ""]), ("2,5", ["2", "5"]), (None, ["0", "1"])]
)
def test_a_process_sees_one_of_the_visible_gpus(monkeypatch, visible, seen):
    for rank, gpu in enumerate(seen):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        show_one_gpu(rank)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
