from dataclasses import replace

import pytest
from train_support import make_pack

from actor.schedule import learning_rate_at
from actor.train_report import Spread, StepReport, TrainReport, UpdateCounts
from rlpipe.config.actor import ActorConfig, OptimizerConfig
from rlpipe.config.layout import ActorLayout, RankPlace
from rlpipe.shared.errors import ActorError
from rlpipe.shared.pack import dummy_pack


def layout(processes, **parallel):
    return ActorLayout.of(ActorConfig(processes=processes, parallel=parallel))


def test_ranks_are_numbered_as_megatron_does_tensor_first_pipeline_last():
    eight = layout(8, tensor=2, pipeline=2)
    assert eight.data_parallel == 2
    assert eight.place(0) == RankPlace(tensor=0, context=0, data=0, pipeline=0)
    assert eight.place(3) == RankPlace(tensor=1, context=0, data=1, pipeline=0)
    assert eight.place(6) == RankPlace(tensor=0, context=0, data=1, pipeline=1)
    assert eight.reporting_ranks == (4, 6)


@pytest.mark.parametrize(
    ("parallel", "sequence", "pack"),
    [
        ({}, 1, 1),
        ({"tensor": 2}, 1, 1),
        ({"tensor": 2, "sequence": True}, 1, 2),
        ({"context": 2}, 4, 4),
        ({"context": 2, "tensor": 4, "sequence": True}, 4, 8),
    ],
)
def test_padding_multiples(parallel, sequence, pack):
    found = layout(8, **parallel)
    assert (found.sequence_multiple, found.pack_multiple) == (sequence, pack)


def test_unequal_pack_counts_are_refused_with_the_counts_and_the_fix():
    two = layout(2)
    pack = make_pack([5], 0, 1)
    with pytest.raises(ActorError, match=r"\[2, 1\].*dummy_pack"):
        two.check_packs([[pack, pack], [pack]], "train")
    with pytest.raises(ActorError, match="packs for 1 data-parallel ranks"):
        two.check_packs([[pack]], "train")
    with pytest.raises(ActorError, match=r"\[0, 0\]"):
        two.check_packs([[], []], "train")
    two.check_packs([[pack, pack], [pack, dummy_pack(two.pack_multiple)]], "train")


def test_packs_that_do_not_fit_the_layout_are_refused():
    with pytest.raises(ActorError, match="5 padded tokens, not a multiple of ActorLayout.sequence_multiple = 4"):
        layout(2, context=2).check_packs([[make_pack([5], 0, 1)]], "train")
    with pytest.raises(ActorError, match="5 padded tokens, not a positive multiple of ActorLayout.pack_multiple = 2"):
        layout(2, tensor=2, sequence=True).check_packs([[make_pack([5], 0, 1)]], "train")


def test_missing_reference_logprobs_name_the_sample():
    pack = make_pack([5], 7, 1)
    with pytest.raises(ActorError, match="pack of 7/0 has none"):
        layout(1).check_reference([dummy_pack(1), pack], "train")
    layout(1).check_reference([dummy_pack(1), replace(pack, ref_logprobs=pack.rollout_logprobs)], "train")


def test_interleaved_schedule_gets_packs_in_groups_of_the_stages():
    interleaved = layout(2, pipeline=2, virtual_pipeline=2)
    packs = [make_pack([5], 0, 1)] * 3
    assert [pack.real_tokens for pack in interleaved.filled(packs)] == [5, 5, 5, 0]
    assert layout(2, pipeline=2).filled(packs) == packs


def test_learning_rate_warms_up_and_decays():
    shared = {"learning_rate": 1.0, "minimum_learning_rate": 0.2, "warmup_steps": 2}
    linear = OptimizerConfig(**shared, schedule="linear")
    rates = [learning_rate_at(step, linear, 6) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = OptimizerConfig(**shared, schedule="cosine", decay_steps=4)
    assert [learning_rate_at(step, cosine, 100) for step in (2, 3, 4, 50)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    constant = OptimizerConfig(learning_rate=3.0)
    assert [learning_rate_at(step, constant, 2) for step in (0, 10)] == [3.0, 3.0]


def test_counts_follow_applied_and_skipped_updates():
    counts = UpdateCounts().after(True).after(False).after(False)
    assert counts == UpdateCounts(attempted=3, applied=1, skipped=2, skipped_in_a_row=2)
    assert counts.after(True).skipped_in_a_row == 0


def test_report_averages_applied_steps_and_takes_the_largest_of_maxima():
    steps = (
        StepReport(True, {"train/loss": 1.0, "mismatch/logprob_abs_max": 0.5}),
        StepReport(True, {"train/loss": 3.0, "mismatch/logprob_abs_max": 0.1}),
        StepReport(False, {"train/loss": float("nan")}, "the loss is nan", ("a",)),
    )
    spread = Spread.of([1.0, 2.0, 6.0])
    assert (spread.minimum, spread.mean, spread.maximum, spread.largest_rank) == (1.0, 3.0, 6.0, 2)
    metrics = TrainReport(steps, 3, 2, 1).metrics
    assert metrics["train/loss"] == 2.0
    assert metrics["mismatch/logprob_abs_max"] == 0.5
    assert metrics["train/updates_skipped_count"] == 1.0
