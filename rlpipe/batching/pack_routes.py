"""Expert choices of the rollout engine: checked, and laid into packs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlpipe.batching.compact_pack import RankPacks
from rlpipe.batching.logprobs import spans
from rlpipe.shared.errors import DataError
from rlpipe.shared.expert_routes import Routes, RouteShape, first_experts
from rlpipe.shared.pack import PackFrame
from rlpipe.shared.sample import Sample


def checked_routes(sample: Sample, shape: RouteShape) -> Routes:
    """Routes of all tokens of `sample`, int16 [prompt + response, layers, experts per token].

    The engine never fed the last token, nor tokens that a tool appended at the end: nothing trained depends on where
    they go, so they go to the first experts. Raises DataError for routes that are missing, twice the same expert for a
    token, or an expert that the model does not have.
    """
    routes, place = sample.routes, f"sample {sample.sample_id}"
    trained = np.flatnonzero(sample.loss_mask)
    needed = sample.prompt_tokens + (int(trained[-1]) if len(trained) else 0)
    sizes = (shape.layers, shape.experts_per_token)
    if routes is None or routes.shape[1:] != sizes or not needed <= len(routes) <= sample.total_tokens:
        have = "none" if routes is None else f"shape {routes.shape}"
        raise DataError(
            f"{place} needs routes of {needed} tokens x {sizes[0]} layers x {sizes[1]} experts but has {have}; the "
            "rollout engine has to return its expert choices"
        )
    chosen = np.sort(routes[:needed, list(shape.expert_layers)], axis=-1)
    if chosen.size and (chosen[..., 0].min() < 0 or chosen[..., -1].max() >= shape.experts):
        wrong = int(chosen.min()) if chosen.min() < 0 else int(chosen.max())
        raise DataError(f"{place} is routed to expert {wrong} of a model with {shape.experts}")
    if (chosen[..., 1:] == chosen[..., :-1]).any():
        token, layer, _ = np.argwhere(chosen[..., 1:] == chosen[..., :-1])[0].tolist()
        raise DataError(f"{place}: token {token} is routed to one expert twice in layer {shape.expert_layers[layer]}")
    whole = first_experts(sample.total_tokens, shape)
    whole[:needed] = routes[:needed]
    return whole


def attach_routes(
    packs: Sequence[Sequence[Sequence[PackFrame]]], routes: Mapping[str, Routes], shape: RouteShape
) -> list[list[list[PackFrame]]]:
    """The same packs (`[data_rank][step][pack]`) with their samples' routes; padding goes to the first experts."""

    def attach(pack: PackFrame) -> PackFrame:
        whole = first_experts(pack.padded_tokens, shape)
        for sample_id, start, length in spans(pack):
            whole[start : start + length] = routes[sample_id]
        return replace(pack, routes=whole)

    return [[RankPacks(map(attach, step)) for step in rank] for rank in packs]
