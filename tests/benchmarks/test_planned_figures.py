"""What `rlpipe plan` says now of the runs whose seconds and peaks are recorded.

Host memory is not compared: it was counted as the machine's, on which other programs began and ended.
"""

import json
import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from rlpipe.commands.cards.record_file import Record as Recorded
from rlpipe.commands.cards.record_file import read_record
from rlpipe.commands.clusters import load_cluster
from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_config
from rlpipe.estimate.run_estimate import MeanTokens, Plan, plan, planned_lengths
from rlpipe.training.trained_share import planned_model

PROJECT = Path(__file__).resolve().parents[2]
BENCHMARKS = PROJECT / "benchmarks"
WITHIN = {" s": 0.2, " GB": 0.1}
OLDER_LOGIT_BYTES = 116  # that the head read or wrote beyond what its kernels do
LEAST = {" s": 0.2, " GB": 2.0}  # below, a figure is not compared
PASSES, PARTS = "passes and exchange s", ("forward s", "backward s", "exchange s")
PEAKS = {"GPU peak, engine works GB", "GPU peak, actor works GB", "actor's tensors at peak GB"}
TITLE = re.compile(
    r"^(?P<tokens>[\d,]+) tokens, (?:(?:full|lora (?P<rank>\d+)), )?guard (?P<guard>\w+), gdn (?P<gdn>\w+), .*"
    r"recompute (?P<recompute>\w+), packs of (?P<pack>[\d,]+) tokens per GPU"
)
TITLE_COLUMNS, CELL_COLUMNS = 32, 12  # of a run's table


@dataclass(frozen=True)
class Record:
    """A file of benchmarks/results, the cluster file of its host, what is not compared, and whether its code had the
    kernels of the head."""

    name: str
    cluster: str
    left_out: frozenset[str] = frozenset()
    head_kernels: bool = False


RECORDS = [
    # A step of 128 requests took its host 2.6 to 2.9 ms, where those of the other records need 3.7.
    Record("whole_step.cuda", "local_1x141gb", frozenset({"rollout s", "step s"}), head_kernels=True),
    Record("whole_step_8_layers.cuda", "local_1x141gb", head_kernels=True),
    Record("whole_step_8_layers_8192.cuda", "local_1x141gb", head_kernels=True),
    Record("whole_step_lora.cuda", "local_1x141gb"),
    # Older than SwiGLU's own kernel, which keeps two widths of the feed-forward less: 16.3 GB of the actor's tensors.
    Record("whole_step_8b.cuda", "local_1x141gb", frozenset(PEAKS)),
    # Rollouts of the same engine and lengths took 6.0 to 10.4 s there, which says nothing of a plan.
    Record("whole_step_flashqla.cuda", "local_1x141gb", frozenset({"rollout s", "step s"})),
    # Older than attention that keeps less, so fewer optimizer states had room beside the passes. Gradients were
    # unmapped while the engines generated, whose memory stays mapped now: a few states go for it.
    Record(
        "whole_step_8b.cuda2",
        "local_2x141gb",
        frozenset({"optimizer s", "GPU peak, engine works GB", "sleep_wake s"}),
    ),
    # Of one iteration, whose rollout comes before the actor has mapped what it goes on holding.
    Record("whole_step_table.cuda2", "local_2x141gb", frozenset({"GPU peak, engine works GB"})),
    # Likewise. The same rollout took 37.0 and 29.7 s there, planned 22.6, and what of the optimizer is exposed 0.25 and
    # 0.18, planned 0.02: why is not known for either.
    Record(
        "whole_step_table_kernels.cuda2",
        "local_2x80gb",
        frozenset({"GPU peak, engine works GB", "rollout s", "step s", "optimizer s"}),
    ),
    # Gradients were unmapped here, too. Of the optimizer 1.12 s were exposed, planned 1.60: its links are faster.
    Record(
        "whole_step.cuda2",
        "local_2x141gb",
        frozenset({"GPU peak, engine works GB", "sleep_wake s", "optimizer s"}),
        head_kernels=True,
    ),
    Record("whole_step_table.cuda4", "local_4x141gb", head_kernels=True),
    # 1.2 s of sleep_wake were the actor's, 0.3 by plan: why is not known.
    Record("whole_step_35b.cuda4", "local_4x141gb", frozenset({"rollout s", "sleep_wake s"})),
]


WIDTHS_WITHIN = SMALL_WITHIN = 0.1


@dataclass(frozen=True)
class Run:
    """Of a record. case: the arguments of `Case`. values: each row's cells, the plan of its day first."""

    case: tuple[int, str, str, int]
    settings: tuple[str, ...]
    values: dict[str, list[float | None]]


def _runs(output: str) -> list[Run]:
    runs: list[Run] = []
    for line in output.splitlines():
        if found := TITLE.match(line):
            tokens, pack = (int(found[name].replace(",", "")) for name in ("tokens", "pack"))
            settings = f"actor.recompute.granularity={found['recompute']}", f"actor.max_tokens_per_gpu={pack}"
            runs.append(Run((tokens, found["guard"], found["gdn"], int(found["rank"] or 0)), settings, {}))
        elif runs and (title := line[:TITLE_COLUMNS].strip()).endswith((" s", " GB")) and "  " not in title:
            cells = line[TITLE_COLUMNS:]
            found_cells = [cells[start : start + CELL_COLUMNS].strip() for start in range(0, len(cells), CELL_COLUMNS)]
            runs[-1].values.setdefault(title, [float(cell.replace(",", "")) if cell else None for cell in found_cells])
    begun = [run for run in runs if PARTS[0] in run.values]  # of others no iteration was finished
    for run in begun:
        columns = zip(*(run.values[part][1:] for part in PARTS), strict=True)
        run.values[PASSES] = [None, *(sum(column) for column in columns)]
    return begun


def _measured(values: list[float | None]) -> float | None:
    """The median from iteration 2 on, when nothing is compiled any more and optimizer states are where they stay."""
    found = [value for value in values[1:] if value is not None]
    return median(found[1:] or found) if found else None


PLAIN_DRAWS_SINCE = "2026-11-29"
"""Before, SGLang drew the tokens of all engines."""


def _host(recorded: Recorded, name: str) -> ClusterConfig:
    """The cluster, with the engines' kernels of when the record was made."""
    cluster = load_cluster(name)
    older: dict[str, float] = {}
    if recorded.date < PLAIN_DRAWS_SINCE:
        older["plain_drawing_memory_passes"] = cluster.speeds.drawing_memory_passes
    if "flash-attention-3" not in recorded.versions:
        older["attention_share_of_bandwidth"] = cluster.speeds.triton_attention_share_of_bandwidth
    return cluster.model_copy(update={"speeds": cluster.speeds.model_copy(update=older)})


def _with_older_head(figures: dict[str, float], planned: Plan) -> dict[str, float]:
    """Softmax and gradient were single operators."""
    lengths, config = planned_lengths(planned.config), planned.config
    logits = lengths.samples * lengths.sequence_tokens * planned.model.shape.vocab_size / config.actor.processes
    more = OLDER_LOGIT_BYTES * logits / (planned.cluster.node.gpu_memory_gigabytes_per_second * 1e9)
    shares = {"forward_backward": 1.0, "step": 1.0, "ref_logprob": 1 / 3}  # a third of it in a forward pass
    return figures | {name: figures[name] + share * more for name, share in shares.items() if name in figures}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_seconds_are_planned_within_a_fifth_and_peaks_within_a_tenth(record, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import whole_step
    from run_table import ROWS
    from whole_step_setup import Case, Setup, planned_figures

    recorded = read_record(BENCHMARKS / "results" / f"{record.name}.json")
    monkeypatch.setattr(sys, "argv", shlex.split(recorded.command)[1:])
    monkeypatch.setattr(whole_step, "present_cluster", lambda: _host(recorded, record.cluster))
    options = whole_step.arguments()
    setup = Setup(options, tmp_path, options.here)
    runs = _runs(recorded.output)
    assert runs
    shape = setup.shape(setup.layers([Case(*run.case) for run in runs]))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text(json.dumps(shape))
    rows = [row for row in ROWS if row.planned and row.title not in record.left_out]
    for run in runs:
        options.settings = list(run.settings)  # what was chosen by memory that day
        planned = setup.plan(setup.write_configuration(Case(*run.case), str(tmp_path / "policy")))
        figures = planned_figures(planned)
        if not record.head_kernels:
            figures = _with_older_head(figures, planned)
        ratios = {}
        for row in rows:
            kind = next((kind for kind in WITHIN if row.title.endswith(kind)), None)
            found = _measured(run.values.get(row.title, []))
            if kind is None or found is None or row.planned not in figures:
                continue
            expected = figures[row.planned] * row.scale
            if max(expected, found) >= LEAST[kind]:
                ratios[row.title] = expected / found
                assert abs(expected / found - 1) <= WITHIN[kind], (run.case, row.title, expected, found)
        print(run.case, {title: f"{ratio:.2f}" for title, ratio in ratios.items()})
        assert {"rollout s", PASSES, *PEAKS} - record.left_out <= ratios.keys()


@pytest.mark.parametrize(
    ("name", "gpus", "recipes", "left_out"),
    [
        ("recipes_9b.cuda", 1, 1, ()),
        ("recipes_8b_lora.cuda", 1, 1, ()),
        ("recipes_4b.cuda", 1, 1, ()),
        ("recipes_4b_dapo.cuda", 1, 1, ()),
        ("recipes_1_7b.cuda", 1, 2, ()),
        ("recipes_0_6b.cuda", 1, 2, ()),
        ("recipes_4b_2gpu.cuda2", 2, 2, ()),
        ("recipes_0_6b_2gpu.cuda2", 2, 2, ()),
        # 128 requests of 1,024 tokens took each engine 7.5 s; 5.9 are planned, and Qwen3-0.6B, with as much attention,
        # took 5.4. Why is not known.
        ("recipes_1_7b_2gpu.cuda2", 2, 2, (("qwen3_1_7b_gsm8k_2gpu", "rollout s"),)),
    ],
)
def test_shipped_recipes_are_planned_within_a_fifth(name, gpus, recipes, left_out, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from shipped_recipes import PROMPT_SHARE

    recorded = read_record(BENCHMARKS / "results" / f"{name}.json")
    tables = re.findall(r"^(\w+): [\d.]+ B; .*packs of ([\d,]+).*\n((?:.+\n)+)", recorded.output, re.MULTILINE)
    # Rows of supervised training are shorter than planned.
    tables = [found for found in tables if "rollout s" in found[-1]]
    assert len(tables) == recipes
    for recipe, pack, table in tables:
        found = {line[:TITLE_COLUMNS].strip(): line[TITLE_COLUMNS:].split() for line in table.splitlines()}
        config = load_config(PROJECT / f"configs/recipes/{recipe}.yaml")
        prompt = int(PROMPT_SHARE * config.data.max_prompt_tokens)
        settings = [
            f"model.path={PROJECT}/configs/models/{Path(config.model.path).name}",
            f"actor.max_tokens_per_gpu={pack.replace(',', '')}",
        ]
        config = load_config(PROJECT / f"configs/recipes/{recipe}.yaml", settings)
        tokens = int(found["tokens of a response"][-1].replace(",", ""))
        cluster = _host(recorded, f"local_{gpus}x141gb")
        seconds = plan(config, planned_model(config), cluster, MeanTokens(prompt, tokens)).seconds
        for row, phase in ((PASSES, "forward_backward"), ("rollout s", "rollout")):
            ratio = seconds[phase] / float(found[row][-1])
            print(recipe, row, f"{ratio:.2f}")
            assert (recipe, row) in left_out or math.isclose(ratio, 1, abs_tol=WITHIN[" s"]), (recipe, row)


def test_steps_of_narrow_and_wide_engines_are_planned_within_a_tenth(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import engine_widths

    recorded = read_record(BENCHMARKS / "results/engine_widths.cuda4.json")
    cluster = _host(recorded, "local_4x141gb")
    monkeypatch.setattr(sys, "argv", shlex.split(recorded.command)[1:])
    monkeypatch.setattr(engine_widths, "present_cluster", lambda: cluster)
    options = engine_widths.arguments()
    (tmp_path / "config.json").write_text(json.dumps(engine_widths.shape(options)))
    found = {}
    for line in recorded.output.splitlines():
        if re.fullmatch(r"[ \d.,]+", line):
            _, width, _, milliseconds, *_ = line.split()
            config = engine_widths.configuration(int(width), str(tmp_path), options)
            planned = plan(config, planned_model(config), cluster).seconds["rollout"] / options.tokens
            found[int(width)] = planned * 1e3 / float(milliseconds)
    assert found.keys() == {1, 2, 4}
    assert all(math.isclose(ratio, 1, abs_tol=WIDTHS_WITHIN) for ratio in found.values()), found


def test_layers_of_a_small_dense_model_and_their_head_are_planned_within_a_tenth():

    cluster = load_cluster("local_1x141gb")
    layers = read_record(BENCHMARKS / "results/actor_layers_dense.cuda.json").output
    head = read_record(BENCHMARKS / "results/actor_head_small.cuda.json").output
    head_seconds = float(re.search(r"^ +4,096 +[\d.]+ +[\d.]+ +([\d.]+)", head, re.MULTILINE)[1]) / 1e3 / 16384
    found = {}
    for count, tokens, milliseconds in re.findall(r"^ +(\d+)x(\d+) +[\d.]+ +([\d.]+)", layers, re.MULTILINE):
        sequences, length = int(count), int(tokens)
        settings = [
            "model.path=configs/models/Qwen3-0.6B",
            f"actor.max_tokens_per_gpu={sequences * length}",
            f"rollout.prompts_per_iteration={sequences}",
            "rollout.samples_per_prompt=1",
            "algorithm.advantage=reinforce_plus_plus",
            "data.max_prompt_tokens=256",
            f"rollout.max_response_tokens={length - 256}",
        ]
        config = load_config(PROJECT / "configs/recipes/qwen3_0_6b_gsm8k.yaml", settings)
        planned = plan(config, planned_model(config), cluster).seconds["forward_backward"]
        found[length] = planned / (float(milliseconds) / 1e3 + sequences * length * head_seconds)
    assert found.keys() == {1280, 8192}
    assert all(math.isclose(ratio, 1, abs_tol=SMALL_WITHIN) for ratio in found.values()), found
