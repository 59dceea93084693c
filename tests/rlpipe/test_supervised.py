"""Supervised sequences: prompt masking, conversations, wrapped packing."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from rlpipe.batching import PackLimits, supervised_sequence
from rlpipe.config.actor import ActorConfig
from rlpipe.config.data import DataConfig, EvalConfig
from rlpipe.config.load import validate
from rlpipe.config.root import Config
from rlpipe.config.supervised import SupervisedConfig, WarmStartConfig
from rlpipe.data import PromptStream
from rlpipe.data.mapped_rows import Preparation
from rlpipe.monitoring.console import Console
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.errors import DataError
from rlpipe.shared.sample import Prompt
from rlpipe.supervised import examples
from rlpipe.supervised.examples import load_examples
from rlpipe.supervised.held_out_loss import HeldOutLoss
from rlpipe.supervised.supervised_packs import supervised_packs, wrap
from rlpipe.supervised.warm_start import WarmStartResult, warm_start
from rlpipe.training import session, sft
from rlpipe.training.checkpoints import RunState


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def _trained_text(sequence, tokenizer):
    """What the trained predictions predict."""
    assert set(sequence.loss_mask.tolist()) == {0, 1}
    return tokenizer.decode(sequence.token_ids[1:][sequence.loss_mask[:-1] > 0])


def _config(folder, rows, **dataset):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "run": {"name": "r", "iterations": 1},
        "model": {"path": "none"},
        "data": {"train": [{"name": "d", "path": str(path), **dataset}], "max_prompt_tokens": 200},
        "rollout": {"max_response_tokens": 8},
    }
    return validate(tree, "test")


def test_only_the_answer_is_trained(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=?", "label": "2", "why": "one and one"}]
    settings = SupervisedConfig(response_template="{why}: {label}")
    (sequence,) = load_examples(_config(tmp_path, rows), settings, tokenizer).sequences
    assert _trained_text(sequence, tokenizer) == "one and one: 2<|im_end|>"


def test_every_assistant_turn_of_a_conversation_is_trained_and_nothing_else(tmp_path, tokenizer):
    turns = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    rows = [{"talk": [{"role": role, "content": text} for role, text in turns]}]
    config = _config(tmp_path, rows, prompt_column="talk")
    (sequence,) = load_examples(config, SupervisedConfig(conversations=True), tokenizer).sequences
    assert _trained_text(sequence, tokenizer) == "b<|im_end|>d<|im_end|>"
    whole = tokenizer.apply_chat_template(rows[0]["talk"], tokenize=False)
    assert tokenizer.decode(sequence.token_ids) == whole


def test_a_conversation_without_assistant_is_refused(tmp_path, tokenizer):
    config = _config(tmp_path, [{"talk": [{"role": "user", "content": "a"}]}], prompt_column="talk")
    with pytest.raises(DataError, match="no assistant turn"):
        load_examples(config, SupervisedConfig(conversations=True), tokenizer)


def test_long_sequences_are_left_out_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "a", "label": "b"}, {"prompt": "a", "label": "b" * 100}]
    examples = load_examples(_config(tmp_path, rows), SupervisedConfig(max_sequence_tokens=80), tokenizer)
    assert (len(examples.sequences), examples.rows.too_long) == (1, 1)


def test_sequences_longer_than_a_pack_are_left_out_at_once_unless_they_are_cut(tmp_path, tokenizer):
    rows = [{"prompt": "a", "label": "b"}, {"prompt": "a", "label": "b" * 100}]
    config = _config(tmp_path, rows).model_copy(update={"actor": ActorConfig(max_tokens_per_gpu=80)})
    whole = load_examples(config, SupervisedConfig(), tokenizer)
    cut = load_examples(config, SupervisedConfig(packing="wrapped"), tokenizer)
    assert [(len(one.sequences), one.rows.too_long) for one in (whole, cut)] == [(1, 1), (2, 0)]
    narrow = config.model_copy(update={"actor": ActorConfig(max_tokens_per_gpu=10)})
    with pytest.raises(DataError, match="all 2 sequences are longer than a pack of 10 tokens"):
        load_examples(narrow, SupervisedConfig(), tokenizer)


def test_wrapped_pieces_fill_packs_and_lose_one_target_a_cut():
    sequences = [supervised_sequence(f"s{i}", [1, 2], [3] * n) for i, n in enumerate((5, 9, 3, 11))]
    pieces = list(wrap(sequences, 8))
    assert [int(token) for piece in pieces for token in piece.token_ids] == [
        int(token) for sequence in sequences for token in sequence.token_ids
    ]
    edges = np.cumsum([piece.tokens for piece in pieces])
    assert set(range(8, int(edges[-1]), 8)) <= set(edges.tolist())
    whole = np.concatenate([sequence.loss_mask for sequence in sequences])
    pieced = np.concatenate([piece.loss_mask for piece in pieces])
    cuts = edges - 1
    assert (np.delete(pieced, cuts) == np.delete(whole, cuts)).all()
    assert (pieced[cuts] == 0).all()


def test_the_loss_weights_of_a_supervised_step_sum_to_one():
    sequences = [supervised_sequence(f"s{i}", [1, 2], [3] * n) for i, n in enumerate((5, 9, 3, 11))]
    actor = ActorConfig(max_tokens_per_gpu=16)
    assert PackLimits.training(actor).capacity_tokens == 16
    for wrapped in (False, True):
        packs = supervised_packs(
            sequences, actor, data_parallel=2, cost=lambda lengths: lengths.astype(float), wrapped=wrapped
        )
        weights = [float(pack.loss_weights.sum()) for rank in packs.ranks for step in rank for pack in step]
        assert sum(weights) == pytest.approx(1.0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_in_which_an_epoch_ends_may_hold_an_example_more_than_once(wrapped):
    sequences = [supervised_sequence(f"s{i}", [1, 2], [3] * n) for i, n in enumerate((5, 9, 3))]
    actor = ActorConfig(max_tokens_per_gpu=16)
    thrice = [*sequences, *sequences[::-1], *sequences]
    packs = supervised_packs(
        thrice, actor, data_parallel=1, cost=lambda lengths: lengths.astype(float), wrapped=wrapped
    )
    laid = [pack for rank in packs.ranks for step in rank for pack in step]
    names = [name for pack in laid for name in pack.sample_ids]
    assert len(set(names)) == len(names) >= len(thrice)
    assert sum(sum(pack.lengths_tokens) for pack in laid) == sum(one.tokens for one in thrice)


class _Actor:
    """Its loss halves with every step, from 1 on. Notes optimizers, and what was trained in each step."""

    def __init__(self):
        self.layout = SimpleNamespace(data_parallel=1)
        self.optimizers, self.trained, self.references, self.token_ids = [], [], 0, []

    def reset_optimizer(self, options, total_steps):
        self.optimizers.append((options, total_steps))

    def train(self, ranks, algorithm):
        assert algorithm.loss == "sft"
        packs = [pack.laid_out() for step in ranks[0] for pack in step]
        self.trained.append([name for pack in packs for name in pack.sample_ids])
        self.token_ids += [token for pack in packs for token in pack.token_ids.tolist()]
        return SimpleNamespace(metrics={"train/loss": 0.5 ** (len(self.trained) - 1)})

    def set_reference(self):
        self.references += 1


@pytest.mark.parametrize(("stop", "steps", "loss"), [(0.0, 6, 2**-5), (0.25, 3, 0.25), (0.24, 4, 0.125)])
def test_a_warm_start_ends_at_its_loss_or_after_its_steps_and_leaves_a_new_optimizer(
    tmp_path, tokenizer, stop, steps, loss
):
    config = _config(tmp_path, [{"prompt": "a", "label": "b"}])
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": "Qwen3-8B"})})
    prompts = [Prompt(f"p{number}", "", (1, 2), str(number), "d") for number in range(9)]
    inputs = SimpleNamespace(config=config, tokenizer=tokenizer, training=SimpleNamespace(prompts=prompts))
    settings = WarmStartConfig(
        steps=6,
        stop_at_loss=stop,
        sequences_per_step=4,
        learning_rate=0.25,
        warmup_steps=3,
        response_template="it is {label}",
    )
    actor = _Actor()
    result = warm_start(inputs, settings, actor, Console(2))
    assert (result.steps, result.loss) == (steps, loss)
    assert [len(set(names)) for names in actor.trained] == [4] * steps
    assert actor.trained[0] != actor.trained[1]
    (first, first_steps), (second, second_steps) = actor.optimizers
    assert (first.learning_rate, first.warmup_steps, first_steps) == (0.25, 3, 6)
    assert (second, second_steps) == (config.actor.optimizer, 1)
    assert actor.references == 1
    assert tokenizer.decode(actor.token_ids).count("it is ") == 4 * steps


@pytest.mark.parametrize(("packing", "wrapped"), [("best_fit", False), ("wrapped", True)])
def test_a_supervised_step_is_made_as_its_section_says(tmp_path, monkeypatch, packing, wrapped):
    asked = []

    def packed(sequences, actor, *, data_parallel, cost, wrapped):
        asked.append((list(sequences), wrapped))
        return SimpleNamespace(ranks=[], report=SimpleNamespace(metrics={}))

    monkeypatch.setattr(sft, "supervised_packs", packed)
    config = _config(tmp_path, [{"prompt": "a", "label": "b"}])
    model, length = (
        config.model.model_copy(update={"path": "Qwen3-8B"}),
        config.run.model_copy(update={"iterations": 2}),
    )
    step = SimpleNamespace(phase=lambda name: nullcontext(), add=lambda metrics: None, metrics={})
    sft._iterate(
        SimpleNamespace(
            config=config.model_copy(update={"model": model, "run": length}),
            settings=SupervisedConfig(sequences_per_step=3, packing=packing),
            start=RunState(),
            stream=PromptStream(range(9), 0, shuffle=False),
            actor=SimpleNamespace(
                layout=SimpleNamespace(data_parallel=1), train=lambda *_: SimpleNamespace(metrics={})
            ),
            checkpoints=SimpleNamespace(iteration=lambda *_: nullcontext(step), commit=lambda record: None),
            log=None,
            state=None,
            data_metrics=dict,
            held_out=SimpleNamespace(is_due=lambda iteration: False, run=lambda *_: {}),
            checkpoint=lambda iteration, metrics: None,
            measurement=SimpleNamespace(finish=lambda *_: None),
            close=lambda: None,
        )
    )
    assert asked == [([0, 1, 2], wrapped), ([3, 4, 5], wrapped)]


class _Scorer:
    """Two data ranks; of a token that is trained the log-probability is its negative id in thousands."""

    layout = SimpleNamespace(data_parallel=2)

    def __init__(self):
        self.calls = []

    def logprobs(self, packs):
        laid = [[pack.laid_out() for pack in rank] for rank in packs]
        self.calls.append([name for rank in laid for pack in rank for name in pack.sample_ids])
        return [[-np.append(p.token_ids[1:], 0) / 1000 * (p.loss_mask > 0) for p in rank] for rank in laid]


@pytest.mark.parametrize(("packing", "longest"), [("best_fit", 40), ("wrapped", 300)])
def test_the_held_out_loss_is_the_mean_over_all_trained_tokens(tmp_path, tokenizer, packing, longest):
    rows = [{"prompt": "what?", "label": "x" * length} for length in (3, 20, 1, longest, 7, 11, 2)]
    config = _config(tmp_path, rows)
    evaluation = EvalConfig(datasets=[{"name": "held", "path": str(tmp_path / "rows.jsonl")}], interval_iterations=2)
    model, length = {"path": "Qwen3-8B"}, {"iterations": 5}
    config = config.model_copy(
        update={
            "eval": evaluation,
            "model": config.model.model_copy(update=model),
            "run": config.run.model_copy(update=length),
            "actor": ActorConfig(max_tokens_per_gpu=96),
        }
    )
    settings = SupervisedConfig(sequences_per_step=3, packing=packing)
    held = load_examples(config, settings, tokenizer, config.eval.datasets)
    loss, actor = HeldOutLoss(config, settings, {"held": held}), _Scorer()
    assert [number for number in range(6) if loss.is_due(number)] == [0, 2, 4, 5]
    assert loss.run(1, actor) == {} and not actor.calls
    answers = [[*tokenizer(row["label"])["input_ids"], tokenizer.eos_token_id] for row in rows]
    tokens = [token for answer in answers for token in answer]
    lost = 0 if packing == "best_fit" else sum(map(len, answers)) - _trained_tokens(held, settings, config)
    found = loss.run(2, actor)["eval/held/loss"]
    assert found == pytest.approx(np.mean(tokens) / 1000, rel=0.01 * lost + 1e-6)
    assert len(actor.calls) == 3 and (lost > 0) == (packing == "wrapped")


def _trained_tokens(held, settings, config):
    """Of the pieces that wrapping makes, each of which loses its last target where it is cut."""
    some = settings.sequences_per_step
    parts = [held.sequences[start : start + some] for start in range(0, len(held.sequences), some)]
    return sum(int(piece.loss_mask.sum()) for part in parts for piece in wrap(part, config.actor.max_tokens_per_gpu))


def test_examples_are_prepared_as_the_data_section_says(tmp_path, tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(examples, "Preparation", lambda *given: asked.append(given) or Preparation(*given))
    config = _config(tmp_path, [{"prompt": "a", "label": "b"}])
    data = DataConfig(train=config.data.train, processes=3, cache_directory=str(tmp_path))
    load_examples(config.model_copy(update={"data": data}), SupervisedConfig(), tokenizer)
    assert asked == [(str(tmp_path), 3)]


@pytest.mark.parametrize("steps", [None, 3])
def test_a_run_begins_with_a_warm_start_where_it_has_one(tmp_path, monkeypatch, steps):
    made = []
    monkeypatch.setattr(session, "warm_start", lambda *given: made.append(given[1]) or WarmStartResult(3, 0.5))
    config = _config(tmp_path, [{"prompt": "a", "label": "b"}]).model_dump()
    config = Config.model_validate(config | {"warm_start": steps and {"steps": steps}})
    clock = SimpleNamespace(task=lambda name, text: nullcontext())
    session._warm_start(SimpleNamespace(config=config), _Actor(), RunDirectory(tmp_path), Console(2), clock)
    assert [settings.steps for settings in made] == ([] if steps is None else [3])


def test_after_a_warm_start_the_reference_is_what_it_taught_and_the_schedule_that_of_all_updates(tmp_path, tokenizer):
    config = _config(tmp_path, [{"prompt": "a", "label": "b"}]).model_dump()
    config["model"]["path"], config["run"]["iterations"] = "Qwen3-8B", 5
    config["algorithm"]["updates_per_iteration"] = 3
    prompts = [Prompt(f"p{number}", "", (1, 2), "<|im_end|>", "d") for number in range(4)]
    inputs = SimpleNamespace(
        config=Config.model_validate(config), tokenizer=tokenizer, training=SimpleNamespace(prompts=prompts)
    )
    actor, steps_before = _Actor(), []
    actor.set_reference = lambda: steps_before.append(len(actor.trained))
    warm_start(inputs, WarmStartConfig(steps=2, stop_at_loss=0.0, sequences_per_step=4), actor, Console(2))
    assert steps_before == [2]
    assert actor.optimizers[1] == (inputs.config.actor.optimizer, 15)
    assert actor.token_ids.count(tokenizer.eos_token_id) == 2 * 4  # text of special tokens in a row stays text


def test_sequences_longer_than_a_pack_of_the_held_out_pass_are_left_out_too(tmp_path, tokenizer):
    rows = [{"prompt": "a", "label": "b"}, {"prompt": "a", "label": "b" * 100}]
    actor = ActorConfig(max_tokens_per_gpu=400, forward_max_tokens_per_gpu=80)
    config = _config(tmp_path, rows).model_copy(update={"actor": actor})
    found = load_examples(config, SupervisedConfig(), tokenizer)
    assert (len(found.sequences), found.rows.too_long) == (1, 1)
