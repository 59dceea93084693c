"""The benchmark of the actor's layers runs on a CPU, and its parts say what they should."""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))


@pytest.mark.slow
def test_it_reports_each_pack_and_where_the_time_went():
    command = ["--tiny", "--packs", "2x16,1x40", "--rounds", "1", "--profile"]
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "benchmarks/actor_layers.py", *command],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert answer.returncode == 0, answer.stderr
    rows = {line.split()[0]: line.split()[1:] for line in answer.stdout.splitlines() if line.strip()}
    for pack in ("2x16", "1x40"):
        milliseconds, tflops = (float(rows[pack][column]) for column in (1, 2))
        assert milliseconds > 0 and tflops >= 0
    assert "Gated DeltaNet on torch" in answer.stdout and "dense GEMM" in answer.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "command"),
    [("actor_layers", ["--model", "Qwen3-0.6B", "--packs", "2x16", "--rounds", "1"]), ("actor_head", ["--profile"])],
)
def test_layers_of_a_dense_model_and_the_head_are_measured(program, command):
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", f"benchmarks/{program}.py", "--tiny", *command],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert answer.returncode == 0, answer.stderr
    rows = {line.split()[0]: line.split()[1:] for line in answer.stdout.splitlines() if line.strip()}
    if program == "actor_layers":
        assert float(rows["2x16"][1]) > 0 and "Gated DeltaNet" not in answer.stdout
        return
    assert "dense GEMM" in answer.stdout
    for chunk in ("16", "32"):
        floor, plain, ours, _ = (float(cell) for cell in rows[chunk])
        assert 0 < floor < min(plain, ours)


@pytest.mark.slow
def test_split_layers_are_compared_with_whole_ones():
    command = ["--layouts", "1", "TP2", "CP2 EP2", "--layers", "4", "--packs", "2x16", "--rounds", "1"]
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "benchmarks/split_layers.py", *command],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert answer.returncode == 0, answer.stderr
    rows = {line[:14].strip(): [float(cell) for cell in line[14:].split()] for line in answer.stdout.splitlines()[2:]}
    assert rows.keys() == {"1", "TP2", "CP2 EP2"}
    for layout, (processes, tokens, *milliseconds, _) in rows.items():
        whole, launched, exchanges, kernels = (sum(milliseconds[start : start + 2]) for start in (0, 2, 4, 6))
        assert (processes, tokens) == (1 if layout == "1" else 2, 32)
        assert 0 < launched <= whole and kernels > 0
        assert (exchanges > 0) == (layout != "1") and exchanges <= whole


def test_time_that_kernels_share_counts_once(_benchmarks):
    from kernel_groups import covered

    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 5.0
    assert covered([]) == 0.0


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape", "grouped GEMM"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT", "dense GEMM"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash", "softmax attention"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "Gated DeltaNet"),
        ("kernel_kernel", "Gated DeltaNet"),
        ("causal_conv1d_bwd_kernel", "short convolution"),
        ("_gradients", "short convolution"),
        ("_spread_rows_beside", "index and scatter"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16", "index and scatter"),
        ("void unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", "copies, casts, cat, fill"),
        ("triton_red_fused__to_copy_add_mean_mul_rsqrt_0", "fused element-wise"),
        ("_sum_rows", "fused element-wise"),
        ("_softmax_parts", "fused element-wise"),
        ("_normalize_gradient", "norms"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor", "element-wise and sums"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "exchanges"),
        ("something new", "other"),
    ],
)
def test_kernels_are_counted_under_their_kind(_benchmarks, kernel, group):
    from kernel_groups import group_of

    assert group_of(kernel) == group


def test_floors_count_the_products_of_the_model_and_what_lies_between_them(_benchmarks):
    from layer_floors import layer_floors
    from layer_shapes import hybrid_config

    from rlpipe.flops import Part, model_flops
    from rlpipe.model.model_reader import describe_model

    shape, lengths = describe_model(hybrid_config(8, 1024, tiny=False)).shape, (8192,) * 4
    floors = layer_floors(shape, lengths, product_flops=800e12, copy_bytes=4e12)
    flops = 3 * sum(work.forward for part, work in model_flops(shape, lengths).parts if part is not Part.HEAD)
    assert floors.total - floors.between == pytest.approx(flops / 800e12)
    assert floors.grouped == pytest.approx(3 * 8 * 32768 * 6 * 8 * 2048 * 512 / 800e12)
    assert floors.attention == pytest.approx(3 * 2 * 2 * 16 * 256 * 4 * 8192**2 / 800e12)
    assert 0.01 < floors.between < 0.1
    twice = layer_floors(shape, lengths * 2, product_flops=800e12, copy_bytes=4e12)
    assert twice.between == pytest.approx(2 * floors.between)
