"""Joins and filters batches of SGLang's scheduler, in a process of its own; prints as JSON whether each is filtered."""

import json
from array import array
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from rollout.requests import SamplingParameters, sglang_sampling
from rollout.sglang_patches import sampling_kinds

VOCABULARY = 50
KINDS = {
    "plain": SamplingParameters(8),
    "greedy": SamplingParameters(8, temperature=0.0),
    "top_p": SamplingParameters(8, top_p=0.8),
    "top_k": SamplingParameters(8, top_k=5),
}


def main() -> None:
    sampling_kinds.install()
    found = {}
    for kind in KINDS:
        batch = made(["plain", "plain"])
        batch.merge_batch(made([kind, "plain"]))
        joined = is_filtered(batch)
        end(batch, 0)
        other_ended = is_filtered(batch)
        end(batch, 1)  # the one of this kind
        found[kind] = [joined, other_ended, is_filtered(batch), len(batch.reqs)]
    print(json.dumps(found))


def made(kinds: list[str]) -> ScheduleBatch:
    """Of requests that are decoding."""
    requests = [Req(kind, "", array("q", [1, 2]), sampling(kind)) for kind in kinds]
    count = len(requests)
    batch = ScheduleBatch(reqs=requests)
    batch.model_config = SimpleNamespace(is_encoder_decoder=False, vocab_size=VOCABULARY)
    batch.device = "cpu"
    for name in ("req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "orig_seq_lens"):
        setattr(batch, name, torch.zeros(count, dtype=torch.int64))
    batch.return_logprob = False
    values = {"temperature": "temperatures", "top_p": "top_ps", "top_k": "top_ks", "min_p": "min_ps"}
    asked = [request.sampling_params for request in requests]
    batch.sampling_info = SamplingBatchInfo(
        **{to: torch.tensor([getattr(one, name) for one in asked]) for name, to in values.items()},
        is_all_greedy=all(one.top_k <= 1 for one in asked),
        is_any_greedy=any(one.top_k <= 1 for one in asked),
        need_top_p_sampling=any(one.top_p != 1.0 for one in asked),
        need_top_k_sampling=any(one.top_k < VOCABULARY for one in asked),
        need_min_p_sampling=False,
        vocab_size=VOCABULARY,
        penalizer_orchestrator=SimpleNamespace(filter=lambda kept: None, merge=lambda other: None),
        device="cpu",
    )
    return batch


def sampling(kind: str) -> SamplingParams:
    parameters = SamplingParams(**sglang_sampling(KINDS[kind], seed=0))
    parameters.normalize(None)
    return parameters


def end(batch: ScheduleBatch, index: int) -> None:
    batch.reqs[index].finished_reason = FINISH_LENGTH(8)
    batch.filter_batch()


def is_filtered(batch: ScheduleBatch) -> bool:
    info = batch.sampling_info
    return info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling


if __name__ == "__main__":
    main()
