"""The parts of the rollout room that need no engine."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_models import save_hybrid

from rlpipe.config.rollout import EngineConfig, GenerateConfig
from rlpipe.config.root import Config
from rlpipe.estimate.engine_pools import needed_pools, pools_within, room_beside
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.sample import Status, VersionSpan
from rlpipe.shared.weights import EngineAdapter
from rollout import kv_memory
from rollout.arguments import EngineSetup, kv_cache_tokens, server_arguments
from rollout.engine import Engine
from rollout.engine_environment import engine_environment
from rollout.engine_launch import engine_setups
from rollout.engine_usage import UsageClock
from rollout.kv_memory import does_without_prefixes
from rollout.model_modules import unneeded_model_modules
from rollout.partial_response import PartialResponse
from rollout.pause import GenerationPause
from rollout.requests import (
    EngineUsage,
    GenerateRequest,
    Generation,
    SamplingParameters,
    sample_seed,
    sglang_sampling,
)
from rollout.responses import ResponseWriter
from rollout.sglang_patches.batch_invariance import ROW_TILE, matrix_product
from rollout.sglang_patches.inverse_cdf import invert_cdf, keep_top, uniform_number
from rollout.sglang_patches.request_batches import RequestBatches
from rollout.sglang_patches.seeded_draw import largest_with_noise


def setup_of(device="cpu", **engine) -> EngineSetup:
    return EngineSetup(0, "/model", device, EngineConfig(**engine), 100, False, False, 0, "name", "/log")


def test_a_cpu_engine_sees_the_stand_ins_and_a_cuda_engine_does_not():
    cpu = engine_environment("cpu", 1, Path("/scratch"), {"PYTHONPATH": "/mine"})
    cuda = engine_environment("cuda", 1, Path("/scratch"), {"PYTHONPATH": "/mine"})
    assert cpu["PYTHONPATH"].split(os.pathsep)[0].endswith("cpu_stand_ins")
    assert cpu["PYTHONPATH"].endswith(os.pathsep + "/mine")
    assert "cpu_stand_ins" not in cuda["PYTHONPATH"]
    assert "SGLANG_USE_CPU_ENGINE" not in cuda


def test_torch_finds_no_triton_in_the_stand_in(tmp_path):
    """Packages that only hosts with GPUs have ask for it where they are imported."""
    program = "from torch.utils import _triton as found; print(found.has_triton_package(), found.has_triton())"
    assert _print_of_cpu_engine(program, tmp_path).split() == ["True", "False"]


def test_a_scheduler_does_not_import_megatron(tmp_path):
    program = """if True:
        import sys
        from rollout.scheduler_ahead import leave_megatron_out
        leave_megatron_out()
        from sglang.srt.debug_utils.dumper import _MegatronPlugin
        print(_MegatronPlugin._available, [name for name in sys.modules if name.startswith("megatron.core.")])
    """
    assert _print_of_cpu_engine(program, tmp_path).split() == ["False", "[]"]


def test_a_spawned_process_does_not_run_the_program_of_its_parent(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""if True:
        import multiprocessing
        print("program", flush=True)
        if __name__ == "__main__":
            from rollout.sglang_patches.scheduler_entry import main_left_out
            process = multiprocessing.get_context("spawn").Process(target=print, args=("process",))
            with main_left_out():
                process.start()
            process.join()
            print(__file__)
    """)
    done = subprocess.run([sys.executable, str(program)], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout.split() == ["program", "process", str(program)], done.stderr


def test_the_stand_in_for_triton_can_be_annotated_with(tmp_path):
    """So kernels do that come with SGLang's for GPUs, and are imported wherever those are installed."""
    program = """
import triton.language as tl

@tl.core.extern
def kernel(first: tl.tensor | tl.tensor_descriptor, second: int | tl.constexpr_type, third: tl.tensor | None): ...

print(kernel.__name__)
"""
    assert _print_of_cpu_engine(program, tmp_path).split() == ["kernel"]


def _print_of_cpu_engine(program: str, folder: Path) -> str:
    environment = os.environ | engine_environment("cpu", 1, folder, os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_each_tensor_parallel_rank_on_a_cpu_is_given_cores():
    environment = engine_environment("cpu", 3, Path("/scratch"), {})
    assert len(environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 3


def test_extra_arguments_are_passed_on_and_reserved_ones_name_our_key():
    known = {"schedule_policy", "dtype"}
    assert server_arguments(setup_of(sglang={"schedule_policy": "fcfs"}), known).get("schedule_policy") == "fcfs"
    with pytest.raises(ConfigError, match=r"sglang\.dtype: .*use rollout\.engine\.dtype"):
        server_arguments(setup_of(sglang={"dtype": "float16"}), known)
    with pytest.raises(ConfigError, match=r"did you mean 'schedule_policy'"):
        server_arguments(setup_of(sglang={"schedule_policies": "fcfs"}), known)


def test_sglang_is_started_as_the_engine_section_says():
    engine = {"dtype": "float32", "tensor_parallel": 2, "context_tokens": 777, "max_running_requests": 9}
    setup = replace(setup_of("cuda", **engine, memory_fraction=0.4, deterministic=False, kv_cache_tokens=55), seed=5)
    wanted = {"dtype": "float32", "tp_size": 2, "context_length": 777, "max_total_tokens": 55, "random_seed": 5}
    wanted |= {"mem_fraction_static": 0.4, "enable_deterministic_inference": False, "model_path": "/model"}
    on_gpu, on_cpu = server_arguments(setup, ()), server_arguments(replace(setup, device="cpu"), ())
    assert wanted.items() <= on_gpu.items() and wanted.items() <= on_cpu.items()
    assert (on_gpu["max_running_requests"], on_cpu["max_running_requests"]) == (10, 9)


def test_engines_are_set_up_as_the_run_says(config_of, tmp_path):
    usual = config_of(engines=3, jit={"warm_up": "on", "stall_factor": 7.0})
    config = Config.model_validate(usual.model_dump() | {"seed": 5})
    setups = engine_setups(config, str(tmp_path), log_directory=str(tmp_path / "logs"))
    assert [setup.index for setup in setups] == [0, 1, 2] and len({setup.instance for setup in setups}) == 3
    for setup in setups:
        assert (setup.seed, setup.verify_weights, setup.jit.stall_factor) == (5, True, 7.0)
        assert setup.request_tokens == 48 + 48
        assert setup.warm_up == (SamplingParameters(0, 1.0),)
        assert setup.log_path == str(tmp_path / f"logs/rollout_engine_{setup.index}.log")


def test_an_engine_that_takes_turns_on_a_gpu_can_give_its_memory_back():
    assert server_arguments(replace(setup_of("cuda"), memory_saver=True), ())["enable_memory_saver"] is True
    assert server_arguments(setup_of("cuda"), ())["enable_memory_saver"] is False
    with pytest.raises(ConfigError, match=r"use ray\.sleep"):
        server_arguments(setup_of("cuda", sglang={"enable_memory_saver": True}), ())


def test_the_default_kv_pool_holds_every_running_request_at_its_longest():
    assert kv_cache_tokens(setup_of(max_running_requests=10)) >= 10 * 100
    assert kv_cache_tokens(setup_of(kv_cache_tokens=77)) == 77


def test_the_pools_of_a_gpu_are_as_large_as_what_the_run_can_use():
    shape = describe_model("Qwen3.5-35B-A3B").shape
    engine = EngineConfig(max_running_requests=128)
    pools = needed_pools(shape, engine, "Qwen3_5MoeForCausalLM", 129, 8448)
    assert pools.token_bytes == 10 * 2 * 2 * 256 * 2
    assert pools.kv_tokens >= 129 * 8448 and pools.states == 5 * 129
    setup = replace(setup_of("cuda"), engine=engine)
    arguments = server_arguments(setup, (), pools_within(pools, 10**12))
    assert (arguments["max_total_tokens"], arguments["max_mamba_cache_size"]) == (pools.kv_tokens, pools.states)
    assert "mamba_full_memory_ratio" not in arguments

    short = pools_within(pools, (pools.kv_bytes + pools.states_bytes) // 2)
    assert not short.fits and short.kv_bytes + short.states_bytes < (pools.kv_bytes + pools.states_bytes) / 2
    divided = server_arguments(setup, (), short)
    assert divided["max_total_tokens"] is None and "max_mamba_cache_size" not in divided
    assert divided["mamba_full_memory_ratio"] == pytest.approx(pools.states_bytes / pools.kv_bytes, rel=0.01)


def test_what_lies_beside_an_engine_that_starts_leaves_its_pools_as_they_are():
    shape = describe_model("Qwen3.5-35B-A3B").shape
    pools = needed_pools(shape, EngineConfig(max_running_requests=128), "Qwen3_5MoeForCausalLM", 129, 8448)
    room = 2 * (pools.kv_bytes + pools.states_bytes)
    beside = room_beside(pools, room)
    assert room / 4 < beside < room / 2
    assert pools_within(pools, room - beside) == pools
    assert not pools_within(pools, room - beside - 2**30).fits
    assert room_beside(pools, room // 4) == 0


@pytest.mark.parametrize(
    ("changes", "leaves_room"),
    [
        ({}, True),
        ({"adapter": EngineAdapter(rank=8, scale=1.0, modules=("q_proj",))}, False),
        ({"engine": EngineConfig(memory_fraction=0.8, tensor_parallel=2)}, False),
        ({"request_tokens": 10**9}, False),
    ],
)
def test_an_engine_leaves_room_only_where_its_pools_are_planned(changes, leaves_room, dense_folder, monkeypatch):
    monkeypatch.setattr(kv_memory, "total_gpu_bytes", lambda gpus: [80 * 10**9])
    engine = EngineConfig(memory_fraction=0.8)
    setup = replace(setup_of("cuda"), model_path=str(dense_folder), **{"engine": engine, **changes})
    room = kv_memory.room_beside_bytes(setup)
    assert 0 < room < 0.8 * 80e9 if leaves_room else room == 0
    monkeypatch.setattr(kv_memory, "total_gpu_bytes", lambda gpus: [0])  # the driver does not say
    assert kv_memory.room_beside_bytes(setup) == 0


@pytest.mark.parametrize(
    ("tokens", "page", "told"), [(1000, 1, False), (960, 64, False), (959, 1, True), (900, 64, True)]
)
def test_a_pool_smaller_than_planned_is_told(tokens, page, told):
    notes = kv_memory.shortage(3, 1000, tokens, page)
    assert bool(notes) is told
    assert all(f"engine 3 has a KV pool of {tokens} tokens, its requests can need 1000" in note for note in notes)
    assert kv_memory.shortage(3, None, tokens, page) == ()


def test_states_are_kept_while_decoding_only_where_a_later_turn_goes_on_from_them():
    def interval(later_turns: bool, recurrent: bool = True, **sglang: int) -> int | None:
        setup = replace(setup_of("cuda", sglang=sglang), later_turns=later_turns)
        return server_arguments(setup, sglang, recurrent=recurrent).get("mamba_track_interval")

    assert interval(later_turns=True) is None
    assert interval(later_turns=False) > 2**20
    assert interval(later_turns=False, recurrent=False) is None
    assert interval(later_turns=False, mamba_track_interval=512) == 512


@pytest.mark.parametrize(("reused", "absent"), [(False, True), (True, False)])
def test_engines_with_recurrent_states_have_a_cache_of_prefixes_where_it_is_reused(
    reused, absent, dense_folder, tmp_path
):
    hybrid = replace(setup_of("cuda"), model_path=save_hybrid(tmp_path / "hybrid", seed=0), reuses_prefixes=reused)
    assert does_without_prefixes(hybrid) is absent
    assert not does_without_prefixes(replace(hybrid, model_path=str(dense_folder)))


@pytest.mark.parametrize(("function", "expected"), [("single_turn", False), ("calculator", True)])
def test_only_single_turns_have_no_later_ones(function, expected, dense_folder, config_of):
    config = config_of()
    rollout = config.rollout.model_copy(update={"generate": GenerateConfig(function=function)})
    config = config.model_copy(update={"rollout": rollout})
    assert engine_setups(config, str(dense_folder))[0].later_turns is expected


def test_settings_of_the_pools_stay():
    shape = describe_model("Qwen3.5-35B-A3B").shape
    engine = EngineConfig(kv_cache_tokens=77, sglang={"max_mamba_cache_size": 5})
    pools = needed_pools(shape, engine, "", 129, 8448)
    assert (pools.kv_tokens, pools.states) == (77, 5)
    assert needed_pools(describe_model("Qwen3-8B").shape, engine, "", 129, 8448).states is None


def test_an_engine_that_cuts_prompts_into_chunks_has_a_slot_to_spare():
    assert server_arguments(setup_of("cuda", max_running_requests=9), ())["max_running_requests"] == 10
    assert server_arguments(setup_of("cuda", max_running_requests=9), ())["cuda_graph_max_bs_decode"] == 10
    assert server_arguments(setup_of(max_running_requests=9), ())["max_running_requests"] == 9
    whole = setup_of("cuda", max_running_requests=9, sglang={"chunked_prefill_size": -1})
    assert server_arguments(whole, {"chunked_prefill_size"})["max_running_requests"] == 9


def test_seeds_are_63_bits_and_differ_by_run_and_sample():
    seeds = {sample_seed(run, f"sample{index}") for run in range(3) for index in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_uniform_numbers_fill_the_unit_interval():
    numbers = torch.tensor([uniform_number(seed, position) for seed in range(50) for position in range(40)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert torch.histc(numbers, 10, 0, 1).min() > 150


def test_inverse_cdf_sampling_follows_the_distribution():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens = invert_cdf(probs.expand(1000, 4), uniform)
    assert torch.bincount(tokens, minlength=4).tolist() == [500, 0, 300, 200]


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8).filter(any), st.floats(0, 1, exclude_max=True))
def test_a_token_without_probability_is_never_chosen(weights, uniform):
    probs = torch.tensor([weights])
    token = invert_cdf(probs, torch.tensor([uniform], dtype=torch.float64)).item()
    assert weights[token] > 0


def test_top_k_and_top_p_keep_each_rows_own_tokens():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 4)
    kept = keep_top(probs, torch.tensor([1, 4, 2, 4]), torch.tensor([1.0, 0.5, 1.0, 1.0]))
    assert (kept > 0).tolist() == [
        [False, True, False, False],
        [False, True, True, False],
        [False, True, True, False],
        [True, True, True, True],
    ]


def test_a_share_of_one_keeps_what_rounded_sums_put_behind_it():
    probs = torch.softmax(torch.randn(8, 50_000, generator=torch.Generator().manual_seed(0)), dim=-1) * 1.00001
    assert torch.equal(keep_top(probs, torch.full((8,), 50_000), torch.ones(8)), probs)


@pytest.mark.parametrize(("inner", "columns"), [(64, 128), (128, 320), (300, 77)])
def test_rows_of_a_product_do_not_depend_on_their_company(inner, columns):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(70, inner, generator=generator)
    right = torch.randn(columns, inner, generator=generator).t()
    whole = matrix_product(left, right)
    assert torch.allclose(whole, left @ right, atol=1e-4)
    for start, rows in ((0, 1), (3, 2), (5, 3), (7, ROW_TILE), (1, 33), (0, 69)):
        assert torch.equal(matrix_product(left[start : start + rows], right), whole[start : start + rows])


class SentMessages(list):
    """Has of a tokenizer manager what requests are sent by, and keeps the messages."""

    def _send_batch_request(self, requests):
        self.append(list(requests))

    def _send_one_request(self, request):
        self.append(request)


async def _send(messages: SentMessages, request: str) -> None:
    messages._send_one_request(request)


def test_requests_of_one_turn_travel_together_and_before_what_must_not_overtake_them():
    messages = SentMessages()

    async def send_some() -> None:
        batches = RequestBatches(messages)
        await asyncio.gather(*(_send(messages, request) for request in "abc"))
        await asyncio.gather(_send(messages, "d"))
        messages._send_one_request("e")
        batches.send()
        messages.append("abort")
        await asyncio.sleep(0)

    asyncio.run(send_some())
    assert messages == [["a", "b", "c"], ["d"], ["e"], "abort"]


def test_sglang_is_asked_for_what_the_parameters_say_and_shares_no_list_of_theirs():
    kind = SamplingParameters(9, 0.5, 0.9, 40, ("stop",), (7, 8), True)
    wanted = {"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "ignore_eos": True}
    wanted |= {"stop": ["stop"], "stop_token_ids": [7, 8], "sampling_seed": 3}
    asked = sglang_sampling(kind, seed=3)
    assert asked == wanted
    asked["stop"].append("other")
    assert sglang_sampling(kind, seed=3) == wanted


def test_usage_counts_overlapping_calls_once():
    clock = UsageClock()
    clock.begin(2)
    clock.begin(1)
    clock.end(2)
    clock.count(5, 0)
    clock.end(1)
    usage = clock.take(3)
    assert (usage.engine, usage.response_tokens, usage.requests) == (3, 5, 1)
    again = clock.take(3)
    assert again == EngineUsage(3, again.interval_seconds, 0.0, 0, 0, 0)
    assert 0 <= again.interval_seconds < usage.interval_seconds + 60


def test_only_the_models_own_file_is_imported(dense_folder):
    skipped = unneeded_model_modules(dense_folder)
    assert "qwen3" not in skipped
    assert {"llama", "qwen3_moe", "deepseek_v2"} <= set(skipped)


def test_no_hash_outweighs_a_probability():
    """SGLang divides by the largest hash, so that this one is infinite noise."""
    least, most = 0, 2**32 - 1
    hashes = torch.tensor([[most, 2**31, 2**31], [least, 2**31, 2**31], [most, 2**31, least]])
    logprobs = torch.tensor([[-60.0, -0.1, -5.0], [-60.0, -5.0, -0.1], [-torch.inf, -torch.inf, 0.0]])
    assert largest_with_noise(logprobs, hashes).flatten().tolist() == [1, 2, 2]


def test_hashes_draw_what_the_weights_say():
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    hashes = torch.randint(0, 2**32, (40_000, 5), generator=generator)
    drawn = largest_with_noise(weights.log().expand(40_000, -1), hashes).flatten()
    shares = torch.bincount(drawn, minlength=5) / 40_000
    assert shares[4] == 0 and torch.allclose(shares, weights, atol=0.015)


def test_a_busy_stretch_counts_once_however_often_it_is_asked_for(monkeypatch):
    now = 0.0
    monkeypatch.setattr("rollout.engine_usage.time", SimpleNamespace(perf_counter=lambda: now))
    clock = UsageClock()
    clock.begin(1)
    now = 10.0
    first = clock.take(0)
    now = 15.0
    clock.end(1)
    assert (first.busy_seconds, clock.take(0).busy_seconds) == (10, 5)


def test_spans_of_a_busy_stretch_follow_each_other_however_often_they_are_asked_for(monkeypatch):
    now = 0.0
    clocks = SimpleNamespace(perf_counter=lambda: now, time=lambda: 1000.0 + now)
    monkeypatch.setattr("rollout.engine_usage.time", clocks)
    clock = UsageClock()
    clock.take_spans(keep=True)
    clock.begin(1)
    now = 10.0
    first = clock.take_spans(keep=True)
    now = 15.0
    clock.end(1)
    spans = [(one.name, one.start_seconds, one.seconds) for one in (*first, *clock.take_spans(keep=False))]
    assert spans == [("generate", 1000, 10), ("generate", 1010, 5)]


def test_whoever_pauses_generation_is_alone_and_responses_wait_for_all_of_them():
    async def script():
        pause, seen = GenerationPause(), []

        async def pauses(name):
            async with pause.paused():
                seen.append(name)
                await asyncio.sleep(0)
                seen.append(name)

        async def runs():
            async with pause.running():
                seen.append("runs")

        await asyncio.gather(pauses("a"), pauses("b"), runs())
        return seen

    assert asyncio.run(script()) == ["a", "a", "b", "b", "runs"]


class HeldEngine(SimpleNamespace):
    """The parts of an engine that write responses, beside no SGLang, which ends responses with token 6. It waits for
    weights that may never come, as after an update that failed."""

    def __init__(self):
        manager = SentMessages()
        manager.rid_to_state, manager.server_args = {}, SimpleNamespace(disable_radix_cache=True)
        manager.context_len, manager.model_config = 100, SimpleNamespace(hf_eos_token_id={6})
        started = SimpleNamespace(scheduler_infos=[{"max_total_num_tokens": 100}])
        sglang = SimpleNamespace(tokenizer_manager=manager, _scheduler_init_result=started)
        pause, usage = GenerationPause(held=True), UsageClock()
        responses = ResponseWriter(sglang, setup_of(), pause, usage)
        super().__init__(_pause=pause, _usage=usage, _responses=responses, _watch=SimpleNamespace(check=lambda: None))


def _aborted(sampling: SamplingParameters, after_seconds: float = 0.01) -> Generation:
    """The answer to a request that goes on from tokens 5 and 6."""
    begun = PartialResponse((5, 6), (-1.0, -2.0), (VersionSpan(0, 2),))

    async def script():
        engine = HeldEngine()
        tasks = engine._responses.start([GenerateRequest("a", (1,), sampling, 0, begun)])
        if after_seconds:
            await asyncio.sleep(after_seconds)
        await Engine.abort(engine)
        ended, late = await asyncio.wait(tasks, timeout=5)
        assert not late
        return next(iter(ended)).result()

    return asyncio.run(script())


@pytest.mark.parametrize("after_seconds", [0, 0.01])
def test_an_abort_answers_what_waits_for_weights_and_what_has_not_begun(after_seconds):
    answer = _aborted(SamplingParameters(8, ignore_eos=True), after_seconds)
    assert (answer.status, answer.token_ids) == (Status.ABORTED, (5, 6))


@pytest.mark.parametrize(
    ("sampling", "status"),
    [
        (SamplingParameters(8), Status.COMPLETED),
        (SamplingParameters(8, ignore_eos=True), Status.ABORTED),
        (SamplingParameters(8, stop_token_ids=(6,), ignore_eos=True), Status.ABORTED),
        (SamplingParameters(2, ignore_eos=True), Status.TRUNCATED),
    ],
)
def test_what_ends_a_response_is_what_its_parameters_say(sampling, status):
    assert _aborted(sampling).status is status


def test_tokens_that_stop_a_response_come_on_top_of_the_models_own():
    responses = HeldEngine()._responses
    assert responses._end_ids(SamplingParameters(8, stop_token_ids=(7, 8))) == {6, 7, 8}


def test_what_was_aborted_before_anything_was_computed_has_read_nothing():
    engine = HeldEngine()
    request = GenerateRequest("a", (1,) * 50, SamplingParameters(8), 0)

    def work(*token_ids):
        logprobs = [(-1.0, token, None) for token in token_ids]
        meta = {"output_token_logprobs": logprobs, "num_retractions": 1, "cached_tokens": 40}
        answer = {"output_ids": list(token_ids), "meta_info": meta | {"finish_reason": {"type": "abort"}}}
        _, _, done = engine._responses._extended(request, PartialResponse(), answer, prefilled_tokens=30)
        return done.retractions, done.prompt_tokens, done.cached_tokens

    assert (work(7), work()) == ((1, 50, 10), (1, 0, 0))
    usage = engine._usage.take(0)
    assert (usage.retractions, usage.prompt_tokens, usage.cached_tokens) == (2, 50, 10)
