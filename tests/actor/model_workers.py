"""What the model tests run inside spawned workers (`train_support.run_processes`); imports Megatron."""

import math
import os
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from model_support import read_tensors, weights_of
from numpy.typing import NDArray
from sent_weights import sent_as_exported
from tensor_bits import bits
from torch.utils._python_dispatch import TorchDispatchMode
from train_support import make_pack

from actor.distributed import start_model_parallel
from actor.head import response_logprobs
from actor.hf.export import iter_export
from actor.hf.load_weights import load_hf
from actor.hf.policy_folder import save_hf
from actor.layers.context_parallel import gather_tokens
from actor.layers.gdn_kernels import load_kernels
from actor.layers.gdn_torch import chunked_delta_rule, unit_heads
from actor.layers.packed import PackedSequences, pack_to_device
from actor.models.build_model import build_model, reduce_replicated_gradients
from actor.models.policy_model import PolicyModel, head_weight
from actor.models.transformer_config import transformer_config
from actor.trainer import Trainer, TrainerOptions
from rlpipe.config.actor import ActorConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.layout import ActorLayout
from rlpipe.model.description import TrainableModel
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.errors import ModelError
from rlpipe.shared.pack import Pack


def each_layout(
    count: int,
    layouts: dict[str, tuple[dict[str, Any], dict[str, Path]]],
    work: Callable[[tuple[str, str], Path, ActorConfig], Any],
) -> dict[tuple[str, str], Any]:
    """(model, layout) -> what `work` returns for it, or a traceback."""
    results: dict[tuple[str, str], Any] = {}
    for layout, (options, paths) in layouts.items():
        actor = ActorConfig(processes=count, dtype="float32", **options)
        start_model_parallel(actor, seed=1)
        for model, path in paths.items():
            try:
                results[model, layout] = work((model, layout), path, actor)
            except Exception:
                traceback.print_exc()  # now, because the other processes may wait for this one for ever
                results[model, layout] = traceback.format_exc()
        parallel_state.destroy_model_parallel()
    return results


def train_layouts(
    rank: int, count: int, layouts: dict[str, tuple[dict[str, Any], dict[str, Path]]], steps: list[list[Pack]]
) -> dict[tuple[str, str], Any]:
    """Train each model of each layout (actor options, checkpoints) over `steps`.

    (model, layout) -> [(gradient norm, loss, multi-token-prediction loss)] or a traceback. Process groups are made once
    per layout: they cost more than training.
    """
    return each_layout(count, layouts, lambda _, path, actor: _train(path, actor, steps))


def _train(path: Path, actor: ActorConfig, steps: list[list[Pack]]) -> list[tuple[float, ...]]:
    trainer = Trainer(TrainerOptions(path, None, False, actor, len(steps)))
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    algorithm = AlgorithmConfig(loss="sft")
    reports = [trainer.train_step(packs[data_rank::data_size], algorithm) for packs in steps]
    names = ("train/gradient_norm", "train/loss", "train/mtp_loss")
    return [tuple(report.metrics.get(name, math.nan) for name in names) for report in reports]


def compare_with_transformers(rank: int, count: int, cases: dict[str, tuple[Path, Pack, Any, Any]]) -> dict[str, Any]:
    """name -> (largest log-probability difference, {tensor: relative gradient error}) or a traceback."""
    results: dict[str, Any] = {}
    actor = ActorConfig(dtype="float32")
    start_model_parallel(actor, seed=1)
    for name, (path, pack, logprobs, gradients) in cases.items():
        try:
            results[name] = _compare(path, actor, pack, logprobs, gradients)
        except Exception:
            results[name] = traceback.format_exc()
    parallel_state.destroy_model_parallel()
    return results


def _compare(
    path: Path, actor: ActorConfig, pack: Pack, wanted: torch.Tensor, gradients: dict[str, torch.Tensor]
) -> tuple[float, dict[str, float]]:
    description = trainable_model(path)
    chunks = build_model(description, actor)
    load_hf(chunks, description, path)
    inputs = pack_to_device(pack)
    scores = response_logprobs(
        chunks[0](inputs), head_weight(chunks[0]), inputs.targets, vocab_size=description.vocab_size, chunk_tokens=50
    )
    (scores.logprobs * torch.from_numpy(weights_of(pack))).sum().backward()
    for parameter in chunks[0].parameters():
        parameter.data = parameter.grad
    errors = {}
    for name, gradient in iter_export(chunks, description):
        reference = gradients.pop(name)
        # The router of one normalized expert per token has no gradient but rounding.
        errors[name] = float((gradient - reference).norm() / reference.norm().clamp(min=1e-2))
    assert not gradients, f"not compared: {sorted(gradients)}"
    return float((scores.logprobs.detach() - wanted).abs().max() / wanted.abs().max()), errors


def exchange_weights(
    rank: int, count: int, layouts: dict[str, tuple[dict[str, Any], dict[str, Path]]], output: Path
) -> dict[tuple[str, str], Any]:
    """Load, stream out and save every model in every layout.

    (model, layout) -> (bytes read, bits of exported tensors by name, names of those that this rank holds, whether all
    ranks together would send the same to engines) or a traceback; the saved folder is `output / layout / model`.
    """
    return each_layout(count, layouts, lambda case, path, actor: _exchange(path, actor, output / case[1] / case[0]))


def _exchange(path: Path, actor: ActorConfig, output: Path) -> tuple[int, dict[str, str], list[str], bool]:
    description = trainable_model(path)
    chunks = build_model(description, actor)
    report = load_hf(chunks, description, path)
    mtp = actor.train_mtp
    exported = {name: bits(tensor) for name, tensor in iter_export(chunks, description, everywhere=True, with_mtp=mtp)}
    held = [name for name, tensor in iter_export(chunks, description, with_mtp=mtp) if tensor is not None]
    save_hf(chunks, description, output, path)
    return report.bytes_read, exported, held, sent_as_exported(chunks, description, ActorLayout.of(actor), mtp)


def save_in_bfloat16(rank: int, count: int, path: Path, output: Path) -> None:
    actor = ActorConfig(dtype="bfloat16")
    start_model_parallel(actor, seed=1)
    description = trainable_model(path)
    chunks = build_model(description, actor)
    load_hf(chunks, description, path)
    save_hf(chunks, description, output, path)
    parallel_state.destroy_model_parallel()


def load_damaged(rank: int, count: int, paths: dict[str, Path]) -> dict[str, tuple[str, list[float]]]:
    """name -> (the error's text, the different values of the parameters, which were 7 before)."""
    start_model_parallel(ActorConfig(), seed=1)
    results = {}
    for name, path in paths.items():
        description = trainable_model(path / "config.json")
        chunks = build_model(description, ActorConfig(dtype="float32"))
        for parameter in chunks[0].parameters():
            parameter.data.fill_(7.0)
        try:
            load_hf(chunks, description, path)
            message = "no error"
        except ModelError as error:
            message = str(error)
        results[name] = (message, torch.cat([p.flatten() for p in chunks[0].parameters()]).unique().tolist())
    parallel_state.destroy_model_parallel()
    return results


def gradients_of_layouts(
    rank: int, count: int, layouts: dict[str, tuple[dict[str, Any], dict[str, Path]]], pack: Pack
) -> dict[tuple[str, str], Any]:
    """(model, layout) -> {Hugging Face name: gradient of the weighted log-probabilities} on rank 0, or a traceback.

    Only layouts whose data-parallel size is 1.
    """
    return each_layout(count, layouts, lambda _, path, actor: _gradients(path, actor, pack))


def _gradients(path: Path, actor: ActorConfig, pack: Pack) -> dict[str, NDArray[np.float32]]:
    description = trainable_model(path)
    chunks = build_model(description, actor)
    load_hf(chunks, description, path)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = DistributedDataParallel(chunks[0].config, options, chunks[0])
    wrapped.zero_grad_buffer()
    inputs = pack_to_device(pack)
    scores = response_logprobs(
        wrapped(inputs),
        head_weight(wrapped),
        inputs.targets,
        vocab_size=description.vocab_size,
        chunk_tokens=37,
        with_entropy=True,
        sequence_parallel=actor.parallel.sequence,
    )
    weights = inputs.take(weights_of(pack))
    ((scores.logprobs + 0.3 * scores.entropy) * weights).sum().backward()
    finalize_model_grads([wrapped], None)
    reduce_replicated_gradients([wrapped])
    for parameter in chunks[0].parameters():
        parameter.data = parameter.main_grad
    exported = iter_export([wrapped], description, with_mtp=actor.train_mtp)
    return {name: tensor.numpy().copy() for name, tensor in exported if tensor is not None}


class _LogitRows(TorchDispatchMode):
    """The most rows of any product with a column for each token of a vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.most = vocabulary, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and result.shape[1] == self.vocabulary:
            self.most = max(self.most, len(result))
        return result


def logit_rows_of_mtp(rank: int, count: int, path: Path, pack: Pack, chunk_tokens: int) -> int:
    """How many tokens' logits the loss of multi-token prediction makes at once."""
    actor = ActorConfig.model_validate({"dtype": "float32", "train_mtp": True, "logprob_chunk_tokens": chunk_tokens})
    start_model_parallel(actor, seed=1)
    description = trainable_model(path)
    chunks = build_model(description, actor)
    load_hf(chunks, description, path)
    with _LogitRows(description.vocab_size) as rows:
        chunks[0](pack_to_device(pack))
    parallel_state.destroy_model_parallel()
    return rows.most


def gather_gradient(rank: int, count: int) -> float:
    """The gradient of `gather_tokens` for rank r's shard of ones, where rank i's loss weighs every row by i + 1."""
    start_model_parallel(ActorConfig.model_validate({"processes": count, "parallel": {"context": count}}), seed=1)
    shard = torch.ones(3, 2, requires_grad=True)
    gathered = gather_tokens(shard, parallel_state.get_context_parallel_group())
    assert gathered.shape == (3 * count, 2)
    ((rank + 1) * gathered).sum().backward()
    parallel_state.destroy_model_parallel()
    assert shard.grad is not None
    return float(shard.grad.mean())


def sequence_leaks(rank: int, count: int, paths: dict[str, Path], lengths: list[int]) -> dict[str, tuple[float, float]]:
    """name -> how much any sequence of a pack moves others' log-probabilities, and their gradients' largest entry."""
    start_model_parallel(ActorConfig(), seed=1)
    results = {}
    for name, path in paths.items():
        description = trainable_model(path)
        chunks = build_model(description, ActorConfig(dtype="float32"))
        load_hf(chunks, description, path)
        results[name] = _leaks(chunks[0], description, make_pack(lengths, 3, 1.0))
    parallel_state.destroy_model_parallel()
    return results


def _leaks(policy: PolicyModel, description: TrainableModel, pack: Pack) -> tuple[float, float]:
    """Outputs: change one sequence's tokens. Gradients: differentiate one sequence's log-probabilities."""
    embedded: list[torch.Tensor] = []
    policy.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))

    def logprobs(token_ids: np.ndarray) -> torch.Tensor:
        inputs = pack_to_device(replace(pack, token_ids=token_ids))
        hidden, weight = policy(inputs), head_weight(policy)
        return response_logprobs(
            hidden, weight, inputs.targets, vocab_size=description.vocab_size, chunk_tokens=50
        ).logprobs

    moved = leaked = 0.0
    reference = logprobs(pack.token_ids)
    for start, end in pairwise(pack.cu_seqlens_padded):
        others = torch.ones(pack.padded_tokens, dtype=torch.bool)
        others[start:end] = False
        changed = pack.token_ids.copy()
        changed[start:end] = (changed[start:end] + 17) % description.vocab_size
        moved = max(moved, float((logprobs(changed) - reference)[others].abs().max()))
        (gradient,) = torch.autograd.grad(reference[start:end].sum(), embedded[0], retain_graph=True)
        leaked = max(leaked, float(gradient[others].abs().max()))
        assert gradient[start:end].abs().max() > 0
    return moved, leaked


def refused_layouts(rank: int, count: int, cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, str]:
    """What `transformer_config` says to each (configuration, parallel layout)."""
    messages = {}
    for name, (raw, parallel) in cases.items():
        actor = ActorConfig.model_validate({"processes": 840, "parallel": parallel})
        messages[name] = _refusal(raw, actor)
    messages["mtp"] = _refusal(next(iter(cases.values()))[0], ActorConfig(train_mtp=True))
    return messages


def _refusal(raw: dict[str, Any], actor: ActorConfig) -> str:
    try:
        transformer_config(trainable_model(raw), actor)
    except ModelError as error:
        return str(error)
    return "not refused"


def gdn_kernel_errors(rank: int, count: int) -> dict[str, float]:
    """Relative error of the torch kernel's output and gradients against the recurrence in float64."""
    ends = (0, 1, 3, 66, 130, 195, 322, 522)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(ends[-1], *shape, generator=generator)

    query, key, value = draw(2, 8), draw(2, 8), draw(6, 12)
    # The last heads still know at a sequence's end what stood at its beginning, four chunks before.
    decay, beta = -draw(6).abs() * torch.tensor([1.0, 1.0, 0.1, 0.1, 1e-3, 1e-3]), draw(6).sigmoid()
    inputs = [x.requires_grad_() for x in (query, key, value, decay, beta)]
    upstream = draw(6, 12)
    unit = [unit_heads(x) for x in inputs[:2]]
    out = chunked_delta_rule(*unit, *inputs[2:], PackedSequences(ends=ends))
    exact = _recurrence(*(x.double() for x in inputs), ends=ends)
    pairs = {"output": (out, exact)}
    ours, theirs = (torch.autograd.grad((x * upstream).sum(), inputs) for x in (out, exact))
    names = ("query", "key", "value", "decay", "beta")
    pairs |= dict(zip(names, zip(ours, theirs, strict=True), strict=True))
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


def gdn_backend_calls(rank: int, count: int) -> dict[str, Any]:
    """What the fla backend hands to a stand-in for fla.

    No fla kernel runs without a GPU; the arguments (heads unrepeated, lengths on both sides, FlashQLA switched off
    before the import) are what can be wrong on this side of them.
    """
    answer: dict[str, Any] = {}

    def rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        answer["shapes"] = [tuple(x.shape) for x in (query, key, value, options["g"], options["beta"])]
        answer["options"] = sorted(options)
        answer["dtype"] = str(options["cu_seqlens"].dtype)
        return value, None

    modules = {"fla": {}, "fla.ops": {}}
    modules["fla.ops.gated_delta_rule"] = {"chunk_gated_delta_rule": rule}
    for name, content in modules.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    kernels = load_kernels("fla")
    sequences = PackedSequences(ends=(0, 4, 10))
    q, v, g = torch.ones(10, 2, 8), torch.ones(10, 6, 8), torch.ones(10, 6)
    answer["backend"] = kernels.backend
    answer["output"] = tuple(kernels.delta_rule(q, q, v, g, g, sequences).shape)
    answer["flash_qla"] = os.environ["FLA_FLASH_QLA"]
    for name in modules:
        del sys.modules[name]
    return answer


def _recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    ends: tuple[int, ...],
) -> torch.Tensor:
    """The gated delta rule one token at a time, key heads repeated for their value heads."""
    share = value.shape[1] // key.shape[1]
    unit = [
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(share, 1) for x in (query, key)
    ]
    q, k = unit[0] * query.shape[-1] ** -0.5, unit[1]
    outputs = []
    for start, end in pairwise(ends):
        state = value.new_zeros(value.shape[1], key.shape[-1], value.shape[-1])
        for t in range(start, end):
            state = state * decay[t].exp()[:, None, None]
            error = (value[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], error)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs)


def reshard(rank: int, count: int, path: Path, folder: Path, layouts: list[dict[str, Any]]) -> list[list[str]]:
    """Save a model in the first layout and load it in each of the others: the tensors that came out changed."""
    wanted, changed = read_tensors(path), []
    for position, parallel in enumerate(layouts):
        actor = ActorConfig.model_validate(
            {"processes": count, "dtype": "float32", "train_mtp": True, "parallel": parallel}
        )
        start_model_parallel(actor, seed=1)
        description = trainable_model(path)
        chunks = build_model(description, actor)
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        if position == 0:
            load_hf(chunks, description, path)
            dist_checkpointing.save(chunks[0].sharded_state_dict(metadata=metadata), str(folder))
        else:
            for parameter in chunks[0].parameters():
                parameter.data.fill_(torch.nan)
            chunks[0].load_state_dict(
                dist_checkpointing.load(chunks[0].sharded_state_dict(metadata=metadata), str(folder))
            )
            exported = iter_export(chunks, description, everywhere=True, with_mtp=True)
            changed.append([name for name, tensor in exported if not torch.equal(tensor, wanted[name])])
        parallel_state.destroy_model_parallel()
    return changed


def replay_own_routes(rank: int, count: int, paths: dict[str, Path], pack: Pack) -> dict[str, Any]:
    """name -> log-probabilities with the router's own choices, and with these choices given as routes."""
    start_model_parallel(ActorConfig(dtype="float32"), seed=1)
    results = {}
    for name, path in paths.items():
        description = trainable_model(path)
        chunks = build_model(description, ActorConfig(dtype="float32"))
        load_hf(chunks, description, path)
        routers = [layer.mlp.router for layer in chunks[0].decoder.layers]
        chosen: list[torch.Tensor] = []
        keep = partial(_keep_choices, chosen)
        hooks = [router.register_forward_hook(keep) for router in routers]
        free = _logprobs(chunks[0], description, pack)
        for hook in hooks:
            hook.remove()
        routes = np.stack([answer.sort(-1).values.numpy() for answer in chosen], axis=1)
        replayed = _logprobs(chunks[0], description, replace(pack, routes=routes.astype(np.int16)))
        results[name] = (free, replayed)
    parallel_state.destroy_model_parallel()
    return results


def _keep_choices(
    chosen: list[torch.Tensor], _: torch.nn.Module, __: tuple[Any, ...], answer: tuple[torch.Tensor, torch.Tensor]
) -> None:
    chosen.append(answer[1])


def _logprobs(chunk: PolicyModel, description: TrainableModel, pack: Pack) -> NDArray[np.float32]:
    inputs = pack_to_device(pack)
    with torch.no_grad():
        scores = response_logprobs(
            chunk(inputs), head_weight(chunk), inputs.targets, vocab_size=description.vocab_size, chunk_tokens=50
        )
    return scores.logprobs.numpy()
