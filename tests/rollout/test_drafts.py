"""Speculative decoding: what is refused, what SGLang is told, and how drafts are chosen and counted."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_worker import answer_of

from actor.hf.weight_table import export_plan
from rlpipe.commands.clusters import load_cluster
from rlpipe.config.draft import DraftConfig
from rlpipe.config.load import load_config
from rlpipe.config.rollout import EngineConfig
from rlpipe.estimate.decoding import EnginePass, break_even_tokens
from rlpipe.estimate.engine_pools import needed_pools, pools_within, states_per_request
from rlpipe.estimate.memory import Model as PlannedModel
from rlpipe.model.draft_checks import check_drafts
from rlpipe.model.model_reader import describe_model, trainable_model
from rlpipe.monitoring.metric_dictionary import check_names
from rlpipe.shared.errors import ConfigError, ModelError
from rlpipe.shared.sample import Status, VersionSpan
from rlpipe.training.summaries import draft_metrics
from rollout.arguments import EngineSetup, check_argument_names, server_arguments
from rollout.device_checks import check_device
from rollout.draft_arguments import chosen_steps
from rollout.engine_usage import UsageClock
from rollout.model_modules import unneeded_model_modules
from rollout.partial_response import PartialResponse, interrupted, without_overshoot
from rollout.requests import EngineUsage
from rollout.sglang_patches.draft_choice import MeasuredSteps
from rollout.sglang_patches.draft_clock import DraftClock, DraftSeconds
from rollout.sglang_patches.draft_verification import drawn_tokens
from rollout.sglang_patches.inverse_cdf import invert_cdf, keep_top, uniform_number
from rollout.sglang_source import declared_server_arguments, sglang_folder
from rollout.weights.drafting_model import note, with_drafting_model
from rollout.weights.loader import WeightLoader

DENSE, EXPERTS = describe_model("Qwen3-8B"), describe_model("Qwen3-30B-A3B")
SMALL = describe_model("Qwen3-0.6B")
HYBRID = replace(describe_model("Qwen3.5-35B-A3B"), mtp_layers=1)


def arguments_of(sent: bool = False, **draft) -> dict:
    engine = EngineConfig(draft=draft)
    setup = EngineSetup(0, "/model", "cuda", engine, 100, False, False, 0, "name", "/log", sends_draft=sent)
    known = server_arguments(setup, ())
    return {name: value for name, value in known.items() if "spec" in name or "draft" in name}


def test_sglang_is_told_to_draft_with_the_models_own_layer():
    assert arguments_of() == {}
    assert arguments_of(method="mtp", steps=2, sent=True) == {
        "speculative_algorithm": "NEXTN",
        "speculative_draft_model_path": "/model",
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 3,
        "enable_draft_weights_cpu_backup": False,
    }
    tree = arguments_of(method="mtp", steps=3, topk=2, tokens=5)
    assert (tree["speculative_eagle_topk"], tree["speculative_num_draft_tokens"]) == (2, 5)
    assert arguments_of(method="mtp")["enable_draft_weights_cpu_backup"]  # no update would bring them back
    assert arguments_of(method="auto")["speculative_adaptive"]
    ngram = arguments_of(method="ngram")
    assert ngram["speculative_algorithm"] == "NGRAM" and ngram["speculative_ngram_max_bfs_breadth"] > 1
    names = declared_server_arguments()
    assert {*arguments_of(method="auto"), *ngram, "speculative_adaptive_config"} <= set(names)
    with pytest.raises(ConfigError, match=r"use rollout\.engine\.draft\.steps"):
        check_argument_names({"speculative_num_steps": 3}, names)


def test_auto_may_choose_no_steps_at_every_batch_size(tmp_path):
    (file,) = chosen_steps(DraftConfig(method="auto", steps=2), tmp_path).values()
    assert json.loads(Path(file).read_text()) == {"1": {"candidate_steps": [0, 2]}}
    assert chosen_steps(DraftConfig(method="mtp"), tmp_path) == {}


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ({"method": "mtp", "steps": 2, "tokens": 5}, "verified as 3 tokens"),
        ({"method": "mtp", "topk": 2}, "draft.tokens does not say"),
        ({"method": "auto", "topk": 2, "tokens": 4}, "'auto' drafts one branch"),
        ({"method": "ngram", "topk": 1}, "make a tree"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(draft, words):
    with pytest.raises(ValueError, match=words):
        DraftConfig(**draft)


@pytest.mark.parametrize(
    ("model", "draft", "words"),
    [
        (DENSE, {"method": "mtp"}, "has 0 multi-token-prediction layers"),
        (DENSE, {"method": "auto"}, "set it to 'ngram' or 'off'"),
        (replace(DENSE, mtp_layers=1), {"method": "mtp"}, "cannot draft with the prediction layer of Qwen3ForCausalLM"),
        (HYBRID, {"method": "mtp", "topk": 2, "tokens": 4}, "topk 2 makes trees"),
        (HYBRID, {"method": "ngram"}, "n-grams make trees"),
        (EXPERTS, {"method": "ngram"}, "algorithm.routing_replay needs"),
    ],
)
def test_what_a_model_cannot_do_is_refused(model, draft, words):
    with pytest.raises(ModelError, match=words):
        check_drafts(model, DraftConfig(**draft), routing_replay=True)


def test_what_a_model_can_do_is_not_refused():
    check_drafts(HYBRID, DraftConfig(method="auto"), routing_replay=True)
    check_drafts(EXPERTS, DraftConfig(method="ngram"))
    check_drafts(DENSE, DraftConfig())
    with pytest.raises(ConfigError, match="need a GPU"):
        check_device("cpu", EngineConfig(draft={"method": "ngram"}))
    check_device("cuda", EngineConfig(draft={"method": "ngram"}))


def test_the_prediction_layers_of_the_families_are_among_sglangs_files():
    files = {file.stem for file in (sglang_folder() / "srt" / "models").glob("*.py")}
    path = str(Path(__file__).parents[2] / "configs" / "models" / "Qwen3.5-9B")
    assert files - set(unneeded_model_modules(path, drafts=True)) == {"qwen3_5", "qwen3_5_mtp"}
    assert files - set(unneeded_model_modules(path)) == {"qwen3_5"}


def break_even(model, requests: int, **draft) -> float:
    """Where the host takes no time."""
    cluster, shape = load_cluster("local_1x141gb"), PlannedModel(model.shape, False)
    free = dict.fromkeys(("decoding_step_seconds", "decoding_request_seconds", "drafting_step_seconds"), 0.0)
    gpu = cluster.model_copy(update={"speeds": cluster.speeds.model_copy(update=free)})
    return break_even_tokens(shape, gpu, 1, DraftConfig(**draft), EnginePass(requests, 10.0))


def test_drafts_must_bring_more_where_a_pass_over_them_reads_or_computes_more():
    one, three = (break_even(HYBRID, 16, method="mtp", steps=steps) for steps in (1, 3))
    assert 1 < one < three
    four = {"method": "ngram", "tokens": 4}
    # Tokens of a few requests choose other experts each; those of many choose all of them in any case.
    assert break_even(EXPERTS, 4, **four) > 1.3 * break_even(EXPERTS, 128, **four)
    assert break_even(EXPERTS, 4, **four) > 1.3 * break_even(DENSE, 4, **four)
    # Thousands of rows are bound by arithmetic.
    assert break_even(DENSE, 1024, **four) > 2 * break_even(DENSE, 16, **four)
    # The host has more to do, which counts where the model is small.
    assert break_even_tokens(
        PlannedModel(SMALL.shape, False),
        load_cluster("local_1x141gb"),
        1,
        DraftConfig(**four),
        EnginePass(4, 10.0),
    ) > break_even(SMALL, 4, **four)


def test_pools_hold_the_drafts():
    plain = needed_pools(HYBRID.shape, EngineConfig(), HYBRID.architecture, 129, 8448)
    engine = EngineConfig(draft={"method": "mtp", "steps": 3})
    drafting = needed_pools(HYBRID.shape, engine, HYBRID.architecture, 129, 8448)
    assert drafting.token_bytes == plain.token_bytes * 11 // 10  # ten layers with keys and values, and the drafting one
    assert drafting.kv_tokens == plain.kv_tokens + 129 * 2 * 4
    assert drafting.verified_bytes == 130 * 4 * plain.state_bytes and plain.verified_bytes == 0
    room = int(1.1 * (plain.kv_bytes + plain.states_bytes))
    assert pools_within(plain, room).fits and not pools_within(drafting, room).fits


def test_states_that_ran_ahead_are_not_kept():
    """SGLang asks for what a prefix cache of states needs only of the classes that it names."""
    engine = EngineConfig(draft={"method": "mtp"})
    assert states_per_request(engine, "Qwen3_5MoeForCausalLM") == 1
    assert states_per_request(engine, "Qwen3_5MoeForConditionalGeneration") > 1
    assert states_per_request(EngineConfig(), "Qwen3_5MoeForCausalLM") > 1


def test_a_run_of_tokens_does_not_go_past_what_ends_the_response():
    response = PartialResponse((5, 6, 7, 8), (-1.0, -2.0, -3.0, -4.0), (VersionSpan(0, 4),))
    shorter = PartialResponse((5, 6), (-1.0, -2.0), (VersionSpan(0, 2),))
    # SGLang answers "length" or "abort" with tokens behind an end token.
    for status in (Status.TRUNCATED, Status.ABORTED):
        assert without_overshoot(response, status, 1, {6}, 10) == (shorter, Status.COMPLETED)
        assert without_overshoot(response, status, 2, {6}, 10) == (response, status)  # it was looked at before
    assert without_overshoot(response, Status.ABORTED, 0, {8}, 2) == (shorter, Status.TRUNCATED)
    assert without_overshoot(response, Status.COMPLETED, 0, {8}, 4) == (response, Status.COMPLETED)
    kept, status = interrupted(response, (), ("ab",), 10, tokens_at_once=2)
    assert (kept.token_ids, status) == ((5,), Status.ABORTED)


def test_kept_drafts_are_counted_by_position():
    clock = UsageClock()
    clock.count(5, 0, kept_drafts=(1, 2))
    clock.count(5, 0, kept_drafts=(1, 0, 4))
    assert clock.take(0).kept_drafts == (2, 2, 4)
    assert clock.take(0).kept_drafts == ()


class Device:
    """Moments of a stream whose work is done later than it is asked for."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.done = 0
        self.asked = 0

    def event(self) -> "Moment":
        return Moment(self)


class Moment:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._device.asked += 1
        self.number, self.milliseconds = self._device.asked, self._device.milliseconds

    def query(self) -> bool:
        return self.number <= self._device.done

    def elapsed_time(self, end: "Moment") -> float:
        return end.milliseconds - self.milliseconds


def test_seconds_of_drafting_are_those_that_the_device_has_ended(tmp_path, monkeypatch):
    monkeypatch.delenv("RLPIPE_DRAFT_SECONDS", raising=False)  # which is set for schedulers, and taken back here
    (tmp_path / "engine_0.draft_seconds.1").write_bytes(b"of an engine that was here before")
    seconds, device = DraftSeconds(tmp_path / "engine_0.log"), Device()
    assert seconds.take() == 0
    clock = DraftClock(tmp_path / "engine_0.draft_seconds.2", device.event)
    other_rank = DraftClock(tmp_path / "engine_0.draft_seconds.3", device.event)
    for milliseconds in (3, 4, 5):
        with clock.stage():
            device.milliseconds += milliseconds
        device.milliseconds += 100  # of verifying, which is no drafting
    assert seconds.take() == 0  # the device has ended none of them
    device.done = 4
    with clock.stage(), other_rank.stage():
        device.milliseconds += 6
    assert seconds.take() == pytest.approx(0.003 + 0.004)
    device.done = device.asked
    with other_rank.stage():
        device.milliseconds += 1
    assert seconds.take() == 0  # of the rank that took longest nothing is told anew
    with clock.stage():
        pass
    assert seconds.take() == pytest.approx(0.005 + 0.006)
    assert DraftSeconds(tmp_path / "engine_0.log").take() == 0


def test_seconds_of_drafting_are_left_out_where_the_disk_is_full(tmp_path, monkeypatch):
    """An engine does not end for a note."""

    def no_room(*arguments):
        raise OSError(errno.ENOSPC, "no room")

    device = Device()
    device.done = 2
    with DraftClock(Path("/dev/full"), device.event).stage():
        device.milliseconds += 1
    with monkeypatch.context() as full:
        full.setattr(os, "open", no_room)
        clock = DraftClock(tmp_path / "draft_seconds.1", device.event)
    with clock.stage():
        device.milliseconds += 1


@pytest.mark.slow
def test_the_stages_that_sglang_marks_are_timed(tmp_path):
    worker = Path(__file__).with_name("draft_clock_worker.py")
    drafted, passed = answer_of(worker, tmp_path, str(tmp_path / "engine_0.log"))
    assert 0.1 <= drafted <= passed


def test_an_iteration_tells_how_long_its_engines_drafted():
    drafting = EngineUsage(0, 9.0, 8.0, 100, 4, 0, kept_drafts=(10, 20, 30, 40), draft_seconds=0.5)
    config = load_config("configs/gpu/drafts.yaml")
    metrics = draft_metrics([drafting, replace(drafting, engine=1, draft_seconds=1.5)], config)
    assert metrics["rollout/draft_seconds"] == 1.0
    assert metrics["rollout/draft_pass_tokens"] == pytest.approx(1 + (20 + 60 + 120) / 100)
    assert metrics["rollout/draft_kept_share"] == pytest.approx((0.9 + 0.7 + 0.4) / 3)
    check_names(metrics)
    assert draft_metrics([replace(drafting, kept_drafts=())], config) == {}


class Engine:
    """Passes of a made-up engine, in seconds by steps, and the tokens that each gives a request."""

    def __init__(self, seconds: dict[int, float], kept: int) -> None:
        self.now = 0.0
        self._seconds = seconds
        self._kept = kept
        self.steps = MeasuredSteps(3, clock=lambda: self.now, agree=lambda steps: steps)

    def run(self, batch_size: int, passes: int) -> list[int]:
        used = []
        for _ in range(passes):
            used.append(self.steps.get_steps_for_batch(batch_size))
            self.now += self._seconds[used[-1]]
            self.steps.on_verify_complete([self._kept if used[-1] else 0] * batch_size, batch_size)
        return used


def test_auto_takes_what_is_faster_at_each_batch_size():
    gains, loses = Engine({0: 0.010, 3: 0.015}, kept=2), Engine({0: 0.010, 3: 0.015}, kept=0)
    assert set(gains.run(4, 100)[80:]) == {3}
    assert set(loses.run(4, 100)[80:]) == {0}
    assert set(loses.run(100, 12)) == {3}  # another batch size has its own trial
    assert 3 in gains.run(4, 3000)[100:] and 0 in gains.run(4, 3000)  # the other is tried again now and then


@pytest.mark.parametrize(("kept", "least", "most"), [(2, 9, 15), (1, 30, 40)])
def test_a_trial_ends_as_soon_as_it_is_clear_what_is_faster(kept, least, most):
    """Passes without drafts, of which two tokens kept make 2.5 times as many for 1.2 times the seconds, and one token
    kept, two for 1.8 times."""
    engine = Engine({0: 0.010, 3: 0.012 if kept == 2 else 0.018}, kept=kept)
    used = engine.run(4, 200)
    assert least <= used.count(0) <= most
    assert set(used[100:]) == {3}


@pytest.mark.parametrize("passes", [5, 20])  # 5: before the first that is measured
def test_an_interruption_is_no_measurement(passes):
    engine = Engine({0: 0.010, 3: 0.015}, kept=2)
    engine.run(4, passes)
    engine.now += 60.0  # an update of weights
    assert set(engine.run(4, 100)[80:]) == {3}


class Sampler:
    """Draws as engines on a CPU do."""

    def _sample_from_probs(self, probs, info, positions, unfiltered):
        if not unfiltered:
            probs = keep_top(probs, info.top_ks, info.top_ps)
        pairs = zip(info.sampling_seed.tolist(), positions.tolist(), strict=True)
        return invert_cdf(probs, torch.tensor([uniform_number(*pair) for pair in pairs], dtype=torch.float64)).int()


def test_what_is_drawn_after_a_draft_is_what_is_drawn_without_one():
    torch.manual_seed(0)
    requests, nodes, vocabulary = 5, 4, 50
    logits = torch.randn(requests * nodes, vocabulary) * 3
    info = SimpleNamespace(
        temperatures=torch.tensor([[1.0], [0.5], [0.7], [1.0], [1.0]]),
        top_ps=torch.tensor([1.0, 0.8, 1.0, 0.3, 1.0]),
        top_ks=torch.tensor([vocabulary, vocabulary, 5, vocabulary, 1]),
        min_ps=torch.zeros(requests),
        sampling_seed=torch.arange(requests) + 2**40,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=False,
    )
    positions = (torch.arange(requests)[:, None] * 7 + torch.arange(nodes)).flatten()
    before = logits.clone()
    drawn = drawn_tokens(Sampler(), logits, info, nodes, positions).reshape(requests, nodes)
    assert torch.equal(logits, before)  # log-probabilities are made of them
    for node in range(nodes):
        alone = drawn_tokens(Sampler(), logits[node::nodes], info, 1, positions[node::nodes])
        assert torch.equal(drawn[:, node], alone)
    assert torch.equal(drawn[4], logits.reshape(requests, nodes, -1)[4].argmax(-1))  # a greedy one


class Model(torch.nn.Module):
    """A loader like SGLang's: a name that it does not know is an error."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.kept = torch.nn.ParameterDict(
            {name.replace(".", "/"): torch.nn.Parameter(torch.zeros(3)) for name in names}
        )

    def load_weights(self, weights):
        for name, tensor in weights:
            self.kept[name.replace(".", "/")].data.copy_(tensor)


def test_an_update_reaches_the_model_and_the_one_that_drafts_for_it():
    model, drafting, alone = Model("head"), Model("mtp.fc"), Model("head")
    note(model, drafting)
    assert dict(model.named_parameters()).keys() == dict(alone.named_parameters()).keys()
    assert with_drafting_model(alone) is alone
    loader = WeightLoader()
    for number in (1.0, 2.0, 3.0):  # asked for, then repeated
        both = with_drafting_model(model)
        loader.load(both, [("head", torch.full((3,), number)), ("mtp.fc", torch.full((3,), -number))])
        loader.finish(both)
        assert model.kept["head"].tolist() == [number] * 3
        assert drafting.kept["mtp/fc"].tolist() == [-number] * 3


def test_an_update_with_drafts_holds_the_prediction_layer_with_stacked_experts(tmp_path):
    model = replace(trainable_model(_config()), fused_experts=True, fused_mtp_experts=True, mtp_layers=1)
    plain, both = export_plan(model), export_plan(model, with_mtp=True)
    more = {spec.name: spec.shape for spec in both[len(plain) :]}
    assert both[: len(plain)] == plain and all(name.startswith("mtp.") for name in more)
    hidden, experts = model.hidden_size, model.experts
    assert more["mtp.fc.weight"] == (hidden, 2 * hidden)
    assert more["mtp.layers.0.mlp.experts.gate_up_proj"] == (experts.experts, 2 * experts.width, hidden)


def _config() -> Path:
    return Path(__file__).parents[2] / "configs" / "models" / "Qwen3.5-35B-A3B"
