"""The chunked head equals log_softmax over all logits, and never makes them."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from train_support import run_processes

HIDDEN, VOCABULARY = 16, 53


def reference(hidden, weight, targets, temperature):
    logits = hidden.flatten(0, -2) @ weight[:VOCABULARY].t() / temperature
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(tokens: int, padded: int = 56):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 1, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(padded, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)
    return hidden, weight, targets, upstream


def check_single(rank, count, cases):
    """(tokens, chunk, temperature, entropy) -> values and gradients against the unchunked computation."""
    from megatron.core import parallel_state

    from actor.head import response_logprobs

    parallel_state.initialize_model_parallel(1)
    for tokens, chunk, temperature, with_entropy in cases:
        hidden, weight, targets, upstream = inputs(tokens)
        scores = response_logprobs(
            hidden,
            weight,
            targets,
            vocab_size=VOCABULARY,
            temperatures=torch.full((tokens,), temperature) if temperature != 1 else None,
            chunk_tokens=chunk,
            with_entropy=with_entropy,
        )
        logprobs, entropy = reference(hidden, weight, targets, temperature)
        torch.testing.assert_close(scores.logprobs, logprobs)
        loss = (scores.logprobs * upstream[0]).sum()
        wanted = (logprobs * upstream[0]).sum()
        if with_entropy:
            torch.testing.assert_close(scores.entropy, entropy)
            loss, wanted = loss + (scores.entropy * upstream[1]).sum(), wanted + (entropy * upstream[1]).sum()
        else:
            assert scores.entropy is None
        ours = torch.autograd.grad(loss, (hidden, weight))
        theirs = torch.autograd.grad(wanted, (hidden, weight))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return True


def check_rows(rank, count):
    """Rows that are not asked for are 0 and get no gradient; no row at all is legal."""
    from megatron.core import parallel_state

    from actor.head import response_logprobs

    parallel_state.initialize_model_parallel(1)
    hidden, weight, targets, upstream = inputs(11)
    rows = torch.tensor([1, 4, 9])
    scores = response_logprobs(
        hidden, weight, targets, vocab_size=VOCABULARY, chunk_tokens=2, rows=rows, with_entropy=True
    )
    logprobs, entropy = reference(hidden, weight, targets, 1.0)
    torch.testing.assert_close(scores.logprobs[rows], logprobs[rows])
    torch.testing.assert_close(scores.entropy[rows], entropy[rows])
    others = [i for i in range(11) if i not in rows.tolist()]
    assert not scores.logprobs[others].any()
    (gradient,) = torch.autograd.grad((scores.logprobs * upstream[0]).sum(), hidden)
    (wanted,) = torch.autograd.grad((logprobs * upstream[0])[rows].sum(), hidden)
    torch.testing.assert_close(gradient, wanted)
    nothing = response_logprobs(
        hidden, weight, targets, vocab_size=VOCABULARY, chunk_tokens=2, rows=torch.zeros(0, dtype=torch.int64)
    )
    gradients = torch.autograd.grad(nothing.logprobs.sum(), (hidden, weight))
    assert not any(gradient.any() for gradient in gradients)
    return True


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation's result had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


class MostAlive(TorchDispatchMode):
    """How many results of `elements` elements were there at once at most; memory that several share counts once."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.alive, self.most = elements, set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.elements:
            storage = result.untyped_storage()
            if id(storage) not in self.alive:
                self.alive.add(id(storage))
                weakref.finalize(storage, self.alive.discard, id(storage))
            self.most = max(self.most, len(self.alive))
        return result


def largest_tensor(rank, count, tokens, chunk):
    """Elements of the largest tensor of a forward and backward with entropy, nothing else is near [T, V]; and how many
    tensors of a chunk's logits were there at once."""
    from megatron.core import parallel_state

    from actor.head import response_logprobs

    parallel_state.initialize_model_parallel(1)
    hidden, weight, targets, upstream = inputs(tokens)
    with LargestTensor() as largest, MostAlive(chunk * VOCABULARY) as chunks:
        scores = response_logprobs(
            hidden, weight, targets, vocab_size=VOCABULARY, chunk_tokens=chunk, with_entropy=True
        )
        (scores.logprobs * upstream[0] + scores.entropy * upstream[1]).sum().backward()
    return largest.elements, chunks.most


def check_tensor_parallel(rank, count):
    """Two ranks, vocabulary padded so that the second holds fewer real rows; with and without sequence parallelism."""
    from megatron.core import parallel_state

    from actor.head import response_logprobs

    parallel_state.initialize_model_parallel(count)
    for padded, tokens in ((56, 12), (120, 12)):  # with 120 the second rank has no real row at all
        hidden, weight, targets, upstream = inputs(tokens, padded)
        logprobs, entropy = reference(hidden, weight, targets, 0.7)
        wanted = (logprobs * upstream[0] + entropy * upstream[1]).sum()
        hidden_wanted, weight_wanted = torch.autograd.grad(wanted, (hidden, weight))
        shard = weight.detach().chunk(count)[rank].clone().requires_grad_()
        for sequence_parallel in (False, True):
            part = hidden.detach().chunk(count)[rank] if sequence_parallel else hidden.detach()
            part = part.clone().requires_grad_()
            scores = response_logprobs(
                part,
                shard,
                targets,
                vocab_size=VOCABULARY,
                temperatures=torch.full_like(targets, 0.7, dtype=torch.float32),
                chunk_tokens=5,
                with_entropy=True,
                sequence_parallel=sequence_parallel,
            )
            torch.testing.assert_close(scores.logprobs, logprobs)
            torch.testing.assert_close(scores.entropy, entropy)
            loss = (scores.logprobs * upstream[0] + scores.entropy * upstream[1]).sum()
            hidden_gradient, weight_gradient = torch.autograd.grad(loss, (part, shard))
            own = hidden_wanted.chunk(count)[rank] if sequence_parallel else hidden_wanted
            torch.testing.assert_close(hidden_gradient, own, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(weight_gradient, weight_wanted.chunk(count)[rank], rtol=1e-4, atol=1e-5)
    return True


def all_single(rank, count):
    """All one-process checks in one worker; the groups are made anew for each."""
    from megatron.core import parallel_state

    cases = [(12, 4, 1.0, True), (13, 5, 0.6, True), (7, 100, 1.3, False), (5, 1, 1.0, True)]
    results = []
    for check in (
        lambda: check_single(rank, count, cases),
        lambda: check_rows(rank, count),
        lambda: largest_tensor(rank, count, 400, 8),
    ):
        results.append(check())
        parallel_state.destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def single():
    return run_processes(1, all_single)[0]


def test_equals_the_unchunked_head_with_ragged_chunks_temperature_and_entropy(single):
    assert single[0] is True


def test_rows_that_are_not_asked_for_cost_nothing(single):
    assert single[1] is True


def test_logits_of_all_tokens_never_exist(single):
    tokens, chunk = 400, 8
    largest, alive = single[2]
    assert chunk * VOCABULARY < largest <= tokens * HIDDEN < tokens * VOCABULARY / 3
    assert alive == 3  # in float32: log p, p and the gradient


def test_two_ranks_equal_one_with_padded_vocabulary_and_sequence_parallelism():
    assert run_processes(2, check_tensor_parallel) == [True, True]
