"""Sends an engine the requests of `warm_up_waves` before it is used, straight to SGLang: nothing counts them."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from rlpipe.shared.replaced_parts import relies_on
from rollout.arguments import EngineSetup
from rollout.requests import SamplingParameters, sglang_sampling
from rollout.warm_up_waves import EngineLimits, Wave, WaveRequest, decoding_waves, warm_up_waves
from rollout.weights.weight_requests import ADAPTER_NAME

relies_on(
    "sglang.srt.entrypoints.engine:Engine._scheduler_init_result",
    why="only the schedulers know the size of their KV pool",
    drop_when="SGLang tells it without an underscore",
)


async def warm_up_engine(sglang: Any, setup: EngineSetup, request_tokens: int) -> None:
    """Every class of batch under the first kind of sampling, and decoding under each other. Prompts stay in SGLang's
    cache of prefixes, which the caller empties.

    request_tokens: the longest prompt plus response that SGLang takes.
    """
    limits = engine_limits(sglang, request_tokens)
    first, *others = setup.warm_up
    prompts = _Prompts(sglang.tokenizer_manager.model_config.vocab_size)
    for wave in warm_up_waves(limits):
        await _send(sglang, setup, wave, first, prompts)
    for kind in others:
        for wave in decoding_waves(limits):
            await _send(sglang, setup, wave, kind, prompts)


def engine_limits(sglang: Any, request_tokens: int) -> EngineLimits:
    """What a started SGLang engine says about itself."""
    arguments = sglang.tokenizer_manager.server_args
    info = sglang._scheduler_init_result.scheduler_infos[0]
    chunk = arguments.chunked_prefill_size
    return EngineLimits(
        running=arguments.max_running_requests,
        request_tokens=request_tokens,
        batch_tokens=chunk if chunk and chunk > 0 else arguments.max_prefill_tokens,
        pool_tokens=info["max_total_num_tokens"],
        step_tokens=arguments.speculative_num_draft_tokens or 1,
        graph_sizes=tuple(sorted(arguments.cuda_graph_config.decode.bs or ())),
    )


class _Prompts:
    """Random tokens, so that experts are chosen about evenly; the same ones in every process."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._generator = np.random.default_rng(0)

    def make(self, request: WaveRequest) -> list[int]:
        generator = self._generator if request.prefix is None else np.random.default_rng(request.prefix)
        ids: list[int] = generator.integers(0, self._vocabulary, request.prompt_tokens).tolist()
        return ids


async def _send(sglang: Any, setup: EngineSetup, wave: Wave, kind: SamplingParameters, prompts: _Prompts) -> None:
    await asyncio.gather(*(_answer(sglang, setup, request, kind, prompts.make(request)) for request in wave))


async def _answer(
    sglang: Any, setup: EngineSetup, request: WaveRequest, kind: SamplingParameters, prompt: list[int]
) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = replace(kind, max_new_tokens=request.new_tokens, stop=(), stop_token_ids=(), ignore_eos=True)
    answers = sglang.tokenizer_manager.generate_request(
        GenerateReqInput(
            input_ids=prompt,
            sampling_params=sglang_sampling(sampling, setup.seed),
            return_logprob=True,
            return_routed_experts=setup.routes_shape is not None,
            lora_path=None if setup.adapter is None else ADAPTER_NAME,
        ),
        None,
    )
    async for _ in answers:
        pass
