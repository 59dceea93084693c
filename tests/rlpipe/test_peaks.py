import logging

import pytest

from rlpipe.flops.peaks import peak_bf16_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA L20", 119.5),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name, peak):
    assert peak_bf16_tflops(name) == peak


@pytest.mark.parametrize(
    "name",
    ["NVIDIA L20Z", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200 NVL", "Tesla V100", "cpu"],
)
def test_unknown_devices_have_no_peak_and_warn_once(name, caplog):
    with caplog.at_level(logging.WARNING):
        assert peak_bf16_tflops(name) is None
        assert peak_bf16_tflops(name) is None
    assert [name in record.getMessage() for record in caplog.records] == [True]


def test_an_override_wins():
    assert peak_bf16_tflops("NVIDIA L20Z", override=800.0) == 800.0
    assert peak_bf16_tflops("NVIDIA H100 80GB HBM3", override=900.0) == 900.0
