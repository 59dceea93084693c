"""Packs: layout, budget, equal counts, loss weights and log-probabilities carried between packs."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.batching import (
    PackLimits,
    TrainingPacks,
    attach_logprobs,
    logprobs_by_sample,
    pack_for_logprobs,
    pack_for_training,
    pack_sequences,
    response_logprobs,
    supervised_sequence,
)
from rlpipe.batching.logprobs import spans
from rlpipe.shared.errors import DataError
from rlpipe.shared.number_arrays import Logprobs, LossMask, TokenIds
from rlpipe.shared.pack import Pack
from rlpipe.shared.sample import Prompt, Reward, Sample, Status, VersionSpan


def sample_of(
    name: str, group: str, prompt_tokens: int, response_tokens: int, advantage: float | None = 1.0, mask=None
) -> Sample:
    """Token ids count up from a number made from the name, so that a token tells where it came from."""
    first = 1000 * (1 + int(name))
    ids = tuple(range(first, first + prompt_tokens + response_tokens))
    return Sample(
        sample_id=name,
        group_id=group,
        prompt=Prompt(group, "", ids[:prompt_tokens], "", "test"),
        response_ids=ids[prompt_tokens:],
        response_text="",
        rollout_logprobs=tuple(-0.001 * i for i in ids[prompt_tokens:]),
        loss_mask=tuple(mask) if mask is not None else (1,) * response_tokens,
        versions=(VersionSpan(0, response_tokens),),
        status=Status.COMPLETED,
        engine=0,
        reward=Reward(1.0, True, ""),
        advantage=advantage,
    )


def only_pack(packed: TrainingPacks) -> Pack:
    """As the process that trains on it gets it: arrays beside the pickled pack, in read-only memory."""
    [[[pack]]] = packed.ranks
    arrays: list[pickle.PickleBuffer] = []
    content = pickle.dumps(pack, protocol=5, buffer_callback=arrays.append)
    return pickle.loads(content, buffers=[bytes(array) for array in arrays]).laid_out()


def test_layout_of_a_pack_by_hand():
    samples = [sample_of("0", "a", 2, 3, 0.5, mask=(1, 0, 1)), sample_of("1", "a", 1, 1, -2.0)]
    packed = pack_for_training(samples, PackLimits(16, 4, 12), data_parallel=1, aggregation="token_mean", norm_tokens=1)
    pack = only_pack(packed)
    assert pack.sample_ids == ("0", "1")
    assert pack.cu_seqlens == (0, 5, 7)
    assert pack.cu_seqlens_padded == (0, 8, 12)
    assert pack.token_ids.tolist() == [1000, 1001, 1002, 1003, 1004, 0, 0, 0, 2000, 2001, 0, 0]
    assert pack.targets.tolist() == [1001, 1002, 1003, 1004, 0, 0, 0, 0, 2001, 0, 0, 0]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert pack.loss_mask.tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    assert pack.loss_weights == pytest.approx(pack.loss_mask / 3)
    assert pack.advantages.tolist() == [0, 0.5, 0.5, 0.5, 0, 0, 0, 0, -2, 0, 0, 0]
    assert pack.rollout_logprobs == pytest.approx([0, -1.002, -1.003, -1.004, 0, 0, 0, 0, -2.001, 0, 0, 0])
    assert packed.report.fill_share == 7 / 16
    assert packed.report.padding_tokens == 5


def test_last_sequence_is_lengthened_to_the_pack_multiple_and_dummies_have_it():
    packed = pack_for_training(
        [sample_of("0", "a", 2, 3)], PackLimits(64, 4, 24), data_parallel=2, aggregation="token_mean", norm_tokens=1
    )
    [real], [dummy] = packed.ranks[0][0], packed.ranks[1][0]
    assert real.cu_seqlens_padded == (0, 24)
    assert dummy.padded_tokens == 24 and dummy.sample_ids == () and not dummy.loss_weights.any()
    assert packed.report.dummy_packs == 1


batches = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=40).map(
    lambda rows: [sample_of(str(i), f"g{group}", p, r) for i, (p, r, group) in enumerate(rows)]
)


@settings(max_examples=60)
@given(
    samples=batches,
    ranks=st.integers(1, 4),
    updates=st.integers(1, 3),
    multiples=st.sampled_from([(1, 1), (4, 4), (4, 12)]),
    budget=st.integers(24, 120),
    count_multiple=st.integers(1, 2),
)
def test_every_sample_once_within_budget_and_equal_counts(samples, ranks, updates, multiples, budget, count_multiple):
    limits = PackLimits(budget, *multiples, count_multiple=count_multiple)
    fitting = [s for s in samples if -(-s.total_tokens // multiples[0]) * multiples[0] <= limits.capacity_tokens]
    arguments = dict(data_parallel=ranks, aggregation="token_mean", norm_tokens=1, updates=updates)
    if not fitting:
        with pytest.raises(DataError, match="longer than a pack"):
            pack_for_training(samples, limits, **arguments)
        return
    packed = pack_for_training(samples, limits, **arguments)
    packs = [pack for rank in packed.ranks for step in rank for pack in step]
    seen = [sample_id for pack in packs for sample_id in pack.sample_ids]
    assert sorted(seen + list(packed.report.oversize_ids)) == sorted(s.sample_id for s in samples)
    assert all(pack.padded_tokens <= budget and pack.padded_tokens % multiples[1] == 0 for pack in packs)
    assert len({tuple(len(step) for step in rank) for rank in packed.ranks}) == 1
    assert all(len(step) % count_multiple == 0 for rank in packed.ranks for step in rank)
    assert len(packed.ranks) == ranks
    for step in range(packed.report.steps):
        weights = sum(float(pack.laid_out().loss_weights.sum()) for rank in packed.ranks for pack in rank[step])
        assert weights == pytest.approx(1, abs=1e-5)


def test_groups_stay_whole_and_in_order_over_the_steps_of_an_iteration():
    samples = [sample_of(str(i), f"g{i % 5}", 2, 3 + i) for i in range(20)]
    packed = pack_for_training(
        samples, PackLimits(64), data_parallel=2, aggregation="token_mean", norm_tokens=1, updates=3
    )
    found = [
        sorted({int(name) % 5 for rank in packed.ranks for pack in rank[step] for name in pack.sample_ids})
        for step in range(3)
    ]
    assert found == [[0], [1, 2], [3, 4]]
    few = pack_for_training(
        samples[:2], PackLimits(64), data_parallel=1, aggregation="token_mean", norm_tokens=1, updates=3
    )
    assert few.report.steps == 2


def test_packing_is_deterministic():
    samples = [sample_of(str(i), f"g{i % 7}", 3, 1 + (i * 37) % 50) for i in range(60)]
    first, second = (
        pack_for_training(samples, PackLimits(80, 4, 4), data_parallel=3, aggregation="group_mean", norm_tokens=1)
        for _ in range(2)
    )
    assert [[[p.sample_ids for p in s] for s in r] for r in first.ranks] == [
        [[p.sample_ids for p in s] for s in r] for r in second.ranks
    ]


def test_samples_longer_than_a_pack_are_left_out_by_name_and_of_the_denominator():
    samples = [sample_of("0", "a", 2, 2), sample_of("1", "a", 2, 40)]
    packed = pack_for_training(samples, PackLimits(16), data_parallel=1, aggregation="token_mean", norm_tokens=1)
    assert packed.report.oversize_ids == ("1",)
    assert packed.report.metrics["pack/oversize_count"] == 1
    assert packed.ranks[0][0][0].laid_out().loss_weights.sum() == 1
    assert "1 sequences longer than a pack left out (1" in str(packed.report)


def test_wrong_batches_are_refused():
    limits = PackLimits(16)
    arguments = dict(data_parallel=1, aggregation="token_mean", norm_tokens=1)
    with pytest.raises(DataError, match="nothing to pack"):
        pack_for_training([], limits, **arguments)
    with pytest.raises(DataError, match="0 occurs twice"):
        pack_for_training([sample_of("0", "a", 2, 2)] * 2, limits, **arguments)
    with pytest.raises(DataError, match="no advantage"):
        pack_for_training([sample_of("0", "a", 2, 2, advantage=None)], limits, **arguments)
    with pytest.raises(DataError, match="empty prompt"):
        pack_for_training([sample_of("0", "a", 0, 2)], limits, **arguments)
    with pytest.raises(DataError, match="all three must be equal"):
        pack_for_training([sample_of("0", "a", 1, 2, mask=(1,))], limits, **arguments)


def test_logprobs_travel_from_forward_packs_to_training_packs():
    samples = [sample_of(str(i), f"g{i % 3}", 2 + i % 4, 1 + (i * 11) % 30) for i in range(17)]
    forward = pack_for_logprobs([replace(s, advantage=None) for s in samples], PackLimits(160, 4, 8), data_parallel=2)
    results = [[pack.laid_out().targets.astype(np.float32) / 1000 for pack in rank] for rank in forward.ranks]
    found = logprobs_by_sample(forward.ranks, results)
    first = samples[0]
    assert response_logprobs(first, found["0"]) == pytest.approx(np.array(first.response_ids) / 1000)
    training = pack_for_training(
        samples, PackLimits(64, 4, 8), data_parallel=3, aggregation="token_mean", norm_tokens=1, updates=2
    )
    attached = attach_logprobs(training.ranks, old=found, reference={k: v + 1 for k, v in found.items()})
    for rank in attached:
        for pack in (pack.laid_out() for step in rank for pack in step):
            trained = pack.loss_mask == 1
            assert pack.old_logprobs[trained] == pytest.approx(pack.targets[trained] / 1000)
            assert pack.ref_logprobs[trained] == pytest.approx(pack.targets[trained] / 1000 + 1)
    del found["3"]
    with pytest.raises(DataError, match="sample 3 needs .* has none"):
        attach_logprobs(training.ranks, old=found)
    with pytest.raises(DataError, match="log-probabilities of shape"):
        logprobs_by_sample(forward.ranks, [[values[1:] for values in rank] for rank in results])


def test_supervised_sequences_mask_the_prompt():
    sequences = [supervised_sequence("0", (5, 6, 7), (8, 9)), supervised_sequence("1", (5,), (8, 9, 4), (0, 1, 1))]
    [[[pack]]] = pack_sequences(sequences, PackLimits(16), data_parallel=1).ranks
    assert pack.targets[pack.loss_mask == 1].tolist() == [8, 9, 9, 4]
    assert pack.loss_weights.sum() == pytest.approx(1)


def test_token_advantages_take_precedence():
    sample = replace(sample_of("0", "a", 2, 3), token_advantages=(0.1, 0.2, 0.3))
    pack = only_pack(
        pack_for_training([sample], PackLimits(8), data_parallel=1, aggregation="token_mean", norm_tokens=1)
    )
    assert pack.advantages == pytest.approx([0, 0.1, 0.2, 0.3, 0])


def test_packs_of_arrays_and_of_tuples_are_alike_and_carry_each_number_once():
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)

    def tuples(index: int, tokens: int) -> Sample:
        mask = [int(place % 3 > 0) for place in range(tokens)] if index % 3 == 0 else None
        sample = sample_of(
            str(index), f"g{index % 4}", 1 + index % 5, tokens, advantage=float(values[index]), mask=mask
        )
        token_advantages = tuple(values[:tokens].tolist()) if index % 5 == 0 else None
        logprobs = tuple((-abs(values[index : index + tokens])).tolist())
        temperature = 0.5 + index % 2 / 2
        return replace(sample, rollout_logprobs=logprobs, temperature=temperature, token_advantages=token_advantages)

    of_tuples = [tuples(index, 1 + index * 7 % 30) for index in range(30)]
    of_arrays = [
        sample.changed(
            response_ids=TokenIds(sample.response_ids),
            rollout_logprobs=Logprobs(sample.rollout_logprobs),
            loss_mask=LossMask(sample.loss_mask),
        )
        for sample in of_tuples
    ]
    options = dict(data_parallel=2, aggregation="sequence_mean", norm_tokens=1, updates=2)
    first, second = (pack_for_training(samples, PackLimits(96, 4, 12), **options) for samples in (of_tuples, of_arrays))
    by_id = {sample.sample_id: sample for sample in of_tuples}
    assert first.report == second.report
    for one, other in zip(*(flat(packed) for packed in (first, second)), strict=True):
        for name, array in vars(one).items():
            np.testing.assert_array_equal(array, getattr(other, name), strict=isinstance(array, np.ndarray))
        for name, start, length in spans(one):
            sample = by_id[name]
            end, prompt = start + length, sample.prompt_tokens
            trained = slice(start + prompt - 1, end - 1)
            advantages = sample.token_advantages or (sample.advantage,) * sample.response_tokens
            assert tuple(one.token_ids[start:end].tolist()) == sample.prompt.token_ids + sample.response_ids
            assert tuple(one.rollout_logprobs[trained].tolist()) == sample.rollout_logprobs
            assert tuple(one.loss_mask[trained].tolist()) == sample.loss_mask
            assert tuple(one.advantages[trained].tolist()) == advantages
            temperatures = np.ones(length) if one.temperatures is None else one.temperatures[start:end]
            assert (temperatures == sample.temperature).all()


@pytest.mark.parametrize("temperatures", [(0.7, 0.7), (1.0, 0.7), (2.0, 1.0)])
def test_a_pack_has_the_temperature_of_each_token_where_one_is_not_1(temperatures):
    samples = [sample_of(str(index), "a", 2, 2).changed(temperature=one) for index, one in enumerate(temperatures)]
    options = dict(data_parallel=1, aggregation="token_mean", norm_tokens=1)
    pack = only_pack(pack_for_training(samples, PackLimits(8, 1, 1), **options))
    assert pack.cu_seqlens_padded == (0, 4, 8)  # no filling, whose temperature is 1
    by_id = dict(zip("01", temperatures, strict=True))
    assert pack.temperatures.tolist() == pytest.approx(np.repeat([by_id[name] for name in pack.sample_ids], 4))
    plain = only_pack(pack_for_training([sample_of("0", "a", 2, 2)], PackLimits(8, 1, 1), **options))
    assert plain.temperatures is None


def flat(packed: TrainingPacks) -> list[Pack]:
    return [pack.laid_out() for rank in packed.ranks for step in rank for pack in step]


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_packs_arrive_as_they_were_whether_a_rank_s_or_one_is_sent(ranks):
    samples = []
    for index in range(30):
        tokens = 1 + index * 7 % 30
        mask = [int(place % 3 > 0) for place in range(tokens)] if index % 4 == 0 else None
        samples.append(sample_of(str(index), f"g{index % 4}", 1 + index % 5, tokens, advantage=index / 7, mask=mask))
    packed = pack_for_training(
        samples, PackLimits(96, 4, 12), data_parallel=ranks, aggregation="token_mean", norm_tokens=1, updates=2
    )
    old = {one.sample_id: np.arange(one.total_tokens, dtype=np.float32) for one in samples}
    ranks_packs = attach_logprobs(packed.ranks, old=old)
    assert (ranks == 40) == any(not pack.sample_ids for rank in ranks_packs for step in rank for pack in step)
    for rank in ranks_packs:
        arrays: list[pickle.PickleBuffer] = []
        sent = pickle.dumps(rank, protocol=5, buffer_callback=arrays.append)
        for step, received in zip(rank, pickle.loads(sent, buffers=arrays), strict=True):
            alone = [pickle.loads(pickle.dumps(pack, protocol=5)) for pack in step]
            for own, *others in zip(step, received, alone, strict=True):
                for name, value in vars(own.laid_out()).items():
                    for other in others:
                        np.testing.assert_array_equal(getattr(other.laid_out(), name), value)
                        assert other.sample_ids == own.sample_ids and other.lengths_tokens == own.lengths_tokens


def test_packs_of_no_sample_arrive_in_their_places():
    samples = [sample_of(str(index), "g", 1, 80) for index in range(3)]
    packed = pack_for_training(samples, PackLimits(96), data_parallel=2, aggregation="token_mean", norm_tokens=1)
    held = [[len(pack.sample_ids) for pack in step] for rank in packed.ranks for step in rank]
    assert sorted(held) == [[1, 0], [1, 1]]
    for rank in packed.ranks:
        received = pickle.loads(pickle.dumps(rank, protocol=5))
        sent, came = ([[pack.sample_ids for pack in step] for step in steps] for steps in (rank, received))
        assert came == sent


def test_what_ranks_are_sent_is_eight_bytes_a_token():
    sample = sample_of("0", "a", 1, 20_000).changed(response_ids=TokenIds.filled(7, 20_000))
    packed = pack_for_training([sample], PackLimits(32_768), data_parallel=1, aggregation="token_mean", norm_tokens=1)
    assert len(pickle.dumps(packed.ranks, protocol=5)) < 8 * 20_000 + 4_000


def test_ranks_are_even_in_what_sequences_cost_and_not_in_their_tokens():
    samples = [sample_of(str(index), "a", 1, tokens - 1) for index, tokens in enumerate((8, 4, 4, 4, 4))]
    options = dict(data_parallel=2, aggregation="token_mean", norm_tokens=1)
    packed = pack_for_training(samples, PackLimits(32), cost=lambda lengths: lengths.astype(float) ** 2, **options)
    held = [sorted(name for step in rank for pack in step for name in pack.sample_ids) for rank in packed.ranks]
    assert sorted(held) == [["0"], ["1", "2", "3", "4"]]
