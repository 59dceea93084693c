"""Optimizer steps of the real Megatron actor in one process."""

import math

import numpy as np
import pytest
from model_support import GDN_MOE, add_mtp, read_tensors, write_checkpoint, write_tensors
from train_support import in_train_worker, run_processes, write_policy

from actor.train_report import UpdateCounts


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    paths = {name: write_policy(folder, name) for name in ("dense", "moe")}
    other = {name: 1.5 * tensor for name, tensor in read_tensors(paths["dense"]).items()}
    paths["other"] = write_tensors(paths["dense"], folder / "other", other)
    paths["mtp"] = add_mtp(write_checkpoint(GDN_MOE, folder / "plain"), folder / "mtp")
    return run_processes(1, in_train_worker, "all_single_process_cases", paths)[0]


def test_any_split_into_packs_gives_the_same_loss_gradient_norm_and_update(results):
    whole, *others = results["splits_of_a_batch"]
    for other in others:
        assert other == pytest.approx(whole, rel=2e-4, abs=2e-6)


def test_non_finite_loss_skips_the_step_and_touches_nothing(results):
    case = results["skipped_steps"]
    assert not case["report"].applied
    assert case["report"].skip_reason == "the loss or a log-probability is not finite"
    assert case["report"].culprit_sample_ids == tuple(sorted(case["bad_ids"]))
    assert math.isnan(case["report"].metrics["train/loss"])
    for one, other in (case["weights"], case["state"], case["final_weights"]):
        assert one == other
    assert case["counts"] == UpdateCounts(attempted=2, applied=1, skipped=1, skipped_in_a_row=1)
    assert case["continues"] == case["without_the_skip"]


def test_non_finite_gradient_is_traced_to_its_pack(results):
    report = results["overflowing_gradients"]["report"]
    assert not report.applied
    assert math.isfinite(report.metrics["train/loss"])
    assert "gradient norm" in report.skip_reason
    assert report.culprit_sample_ids == tuple(sorted(results["overflowing_gradients"]["bad_ids"]))


def test_training_stops_after_the_allowed_skips_in_a_row(results):
    steps, counts = results["too_many_skips"]
    assert steps == 2
    assert counts == UpdateCounts(attempted=2, applied=0, skipped=2, skipped_in_a_row=2)


def test_frozen_parameters_stay_and_bad_patterns_are_refused(results):
    unchanged, (fused, missing) = results["frozen_parameters"]
    assert unchanged and all("embed_tokens" in name or "layers.0." in name for name in unchanged)
    assert "model.embed_tokens.weight" in unchanged and "model.layers.0.mlp.up_proj.weight" in unchanged
    assert "q_proj" in fused and "k_proj" in fused and "match all of them or none" in fused
    assert "no_such_name" in missing and "matches no parameter" in missing


def test_recomputation_changes_nothing_where_no_gradient_reaches_the_embedding(results):
    kept, *recomputed = results["recomputed_above_a_frozen_embedding"]
    for found in recomputed:
        for step, wanted in zip(found, kept, strict=True):
            assert step == pytest.approx(wanted, rel=1e-5)


def test_the_share_of_the_optimizer_on_the_host_changes_nothing(results):
    on_device, half, on_host = results["offload_fractions"]
    for other in (half, on_host):
        assert np.allclose(on_device, other, rtol=1e-5, atol=1e-6)


def test_moments_in_host_memory_are_made_there_alone(results):
    (on_device, made_on_device), (_, made_beside_the_host) = results["moments_beside_the_hosts"]
    assert made_on_device >= 2 * on_device
    assert made_beside_the_host == 0


def test_weight_decay_spares_parameters_with_one_dimension(results):
    for name, (dimensions, from_decayed, from_original) in results["weight_decay"].items():
        distance = from_original if dimensions == 1 else from_decayed
        assert distance < 1e-6, name


def test_reset_optimizer_starts_over_from_the_present_weights(results):
    case = results["optimizer_reset"]
    assert case["counts"] == UpdateCounts()
    assert case["rate"] == 0.25
    assert case["moments"] == 0
    assert case["masters"] == 0


def test_reference_policy_is_kept_beside_the_policy(results):
    case = results["reference_policy"]
    for one, other in (case["start"], case["weights"], case["new_reference"]):
        assert one == other
    assert case["policy_moved"] > 1e-3
    assert case["zero_outside"] == 0
    assert "algorithm.kl.coefficient" in case["error"]


def test_policy_and_reference_of_folders_of_their_own_are_what_lies_there(results):
    found, wanted = results["reference_of_its_own"]
    assert found == wanted
    assert wanted[0] != wanted[1]


def test_kl_term_is_zero_at_the_start_and_grows(results):
    first, second = results["kl_term"]
    assert first["train/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert second["train/kl_loss"] > 1e-4
    assert second["train/loss"] == pytest.approx(second["train/policy_loss"] + 0.3 * second["train/kl_loss"], rel=1e-5)


def test_recorded_old_logprobs_give_the_on_policy_step_and_then_a_ratio(results):
    on_policy, with_old, later = results["old_logprobs"]
    assert with_old == pytest.approx(on_policy, rel=1e-4, abs=1e-6)
    assert abs(later["train/ratio_mean"] - 1) > 1e-4
    assert 0 < later["train/clip_share"] < 1


def test_an_update_after_another_does_not_take_the_policy_s_change_for_a_difference_between_engine_and_actor(results):
    first, second, after_a_skip = results["two_updates_against_the_engine"]
    assert first["mismatch/logprob_abs_max"] < 1e-5
    assert abs(second["train/ratio_mean"] - 1) > 1e-4
    assert not [name for name in second if name.startswith("mismatch/")]
    assert after_a_skip["mismatch/logprob_abs_max"] < 1e-5


def test_temperature_sharpens_the_log_probabilities(results):
    plain, sharp = results["temperature_of_the_head"]
    half = len(plain) // 2
    assert np.array_equal(plain == 0, sharp == 0)
    assert sharp[:half].std() > plain[:half].std()
    assert np.array_equal(sharp[half:], plain[half:])


def test_moments_in_bfloat16_train_like_those_in_float32(results):
    (exact, exact_kinds), (half, half_kinds) = results["half_precision_moments"]
    assert exact_kinds == ["torch.float32"] and half_kinds == ["torch.bfloat16"]
    assert half == pytest.approx(exact, rel=2e-3)
    assert half != exact


def test_every_option_of_adam_counts_as_in_torch(results):
    apart, norms = results["unusual_options"]
    assert apart < 1e-4
    for ours, theirs in norms:
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert ours > 0.05  # so that clipping counts, too


def test_gradients_of_half_precision_are_added_up_in_full(results):
    assert results["gradients_of_half_precision"] == {("torch.bfloat16", "torch.float32")}


def test_a_bonus_for_entropy_raises_it(results):
    first, second, third = results["entropy_bonus"]
    assert first["train/gradient_norm"] > 1e-4
    assert first["train/entropy"] < second["train/entropy"] < third["train/entropy"]


def test_adapters_leave_nothing_out_of_log_probabilities(results):
    _, found, _ = results["dropout_of_adapters"]
    assert len(set(found)) == 1


def test_adapters_leave_inputs_out_again_after_a_pass_of_log_probabilities(results):
    _, _, (one, other) = results["dropout_of_adapters"]
    assert one != other


def test_what_was_thrown_away_does_not_count_in_the_loss_of_multi_token_prediction(results):
    alone, *others = results["mtp_losses_of_a_step"]
    assert others == pytest.approx([alone, alone], rel=1e-5)
