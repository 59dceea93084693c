"""Attention of a CPU engine: right, and for each token what it would be alone, decoded or read."""

import pytest
import torch

from rollout.sglang_patches.cpu_attention import PagedAttention

HEADS, KEY_VALUE_HEADS, CHANNELS, POSITIONS = 4, 2, 64, 128


@pytest.fixture(autouse=True)
def one_thread():
    """As in an engine: with more, the kernel's sums depend on the batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_requests_that_do_not_fit_together_are_what_each_is_alone():
    torch.manual_seed(0)
    requests = 150  # at 64 KiB of keys for each: more than fit at once
    table = 1 + torch.randperm(requests * POSITIONS).view(requests, POSITIONS).int()
    keys, values = torch.randn(2, requests * POSITIONS + 1, KEY_VALUE_HEADS, CHANNELS)
    query = torch.randn(requests, HEADS, CHANNELS)
    lengths = torch.randint(1, POSITIONS + 1, (requests,))
    lengths[:100] = POSITIONS
    rows = torch.arange(requests)

    def attend(which):
        output = torch.empty_like(query[which])
        return PagedAttention().decode(
            query[which], output, keys, values, table, rows[which], lengths[which], enable_gqa=True
        )

    together = attend(rows)
    for one in range(0, requests, 7):
        assert torch.equal(together[one], attend(rows[one : one + 1])[0])
        slots = table[one, : lengths[one]].long()
        repeated = [cache[slots].repeat_interleave(HEADS // KEY_VALUE_HEADS, 1) for cache in (keys, values)]
        weights = torch.einsum("hd,phd->hp", query[one], repeated[0]).div(CHANNELS**0.5).softmax(-1)
        assert torch.allclose(together[one], torch.einsum("hp,phd->hd", weights, repeated[1]), atol=1e-5)


@pytest.mark.parametrize("cached", [0, 1, 31, 32, 33, 90])
@pytest.mark.parametrize("key_value_heads", [2, 4])
def test_a_token_of_a_prompt_is_what_it_would_be_decoded_whatever_is_cached(cached, key_value_heads):
    torch.manual_seed(0)
    lengths = torch.tensor([97, 128, 91])
    table = 1 + torch.randperm(3 * POSITIONS).view(3, POSITIONS).int()
    keys, values = torch.randn(2, 3 * POSITIONS + 1, key_value_heads, CHANNELS)
    places = [torch.arange(cached, length) for length in lengths.tolist()]
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor([len(place) for place in places]))
    query = torch.randn(len(rows), HEADS, CHANNELS)
    grouped = {"enable_gqa": key_value_heads != HEADS}
    read, decoded = torch.empty_like(query), torch.empty_like(query)
    counts = lengths - cached
    PagedAttention().extend(
        query, read, keys, values, table, torch.arange(3), lengths, lengths - counts, counts, causal=True, **grouped
    )
    PagedAttention().decode(query, decoded, keys, values, table, rows, torch.cat(places) + 1, **grouped)
    assert torch.equal(read, decoded)


def test_layers_of_a_pass_share_what_is_worked_out_and_the_next_pass_does_not():
    torch.manual_seed(0)
    positions = 256
    table = 1 + torch.randperm(40 * positions).view(40, positions).int()
    layers = torch.randn(3, 2, 40 * positions + 1, KEY_VALUE_HEADS, CHANNELS)
    kept = PagedAttention()
    for rows in (torch.randperm(40)[:20], torch.randperm(40)[:33]):
        lengths = torch.randint(1, positions + 1, (len(rows),))
        query = torch.randn(len(rows), HEADS, CHANNELS)
        kept.begin_pass()
        for keys, values in layers:
            arguments = (keys, values, table, rows, lengths)
            fresh = PagedAttention().decode(query, torch.empty_like(query), *arguments, enable_gqa=True)
            assert torch.equal(kept.decode(query, torch.empty_like(query), *arguments, enable_gqa=True), fresh)
            one = slice(7, 8)
            alone = PagedAttention().decode(
                query[one], torch.empty_like(query[one]), keys, values, table, rows[one], lengths[one], enable_gqa=True
            )
            assert torch.equal(fresh[one], alone)
