"""Whether to draft at a batch size, by what was measured there: in place of SGLang's choice by acceptance alone, which
does not know what a draft costs."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from rlpipe.shared.replaced_parts import replaces

replaces(
    "sglang.srt.speculative.adaptive_runtime_state:AdaptiveSpeculativeParams",
    why="it raises and lowers steps by how many drafts are kept, whatever they cost at the batch size",
    drop_when="SGLang measures tokens per second with and without drafts",
)

_TRIAL_PASSES = 32
_FIRST_LOOK_PASSES = 12
_HELD_PASSES = 2048
_SETTLING_PASSES = 4
"""After a change: the pass under way still has the steps of before, and graphs are warm from the next ones on."""
_GAIN = 1.03
_CLEAR = 1.3
"""How many times faster one must be for a first look to end a trial: the tokens of so few passes vary by chance."""


def install() -> None:
    """Call in a scheduler process of an engine whose drafts are `auto`."""
    from sglang.srt.speculative import adaptive_runtime_state

    adaptive_runtime_state.AdaptiveSpeculativeParams = MeasuredSteps


@dataclass
class _Measured:
    """The latest passes with one number of steps: seconds and tokens of each."""

    passes: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_TRIAL_PASSES))

    def note(self, seconds: float, tokens: int) -> None:
        self.passes.append((seconds, tokens))

    @property
    def tokens_per_second(self) -> float:
        """By the median of the seconds: a pass may have had prompts, an update or nothing to do before it."""
        if not self.passes:
            return 0.0
        return fmean(tokens for _, tokens in self.passes) / median(seconds for seconds, _ in self.passes)


@dataclass(frozen=True)
class _Stage:
    """So many passes with these steps. held: as chosen by a trial, not in one."""

    steps: int
    passes: int
    held: bool = False


@dataclass
class SizeChoice:
    """The steps of one class of batch sizes: both candidates are tried, the faster one is held, then the other is
    tried again. A trial ends early where one of them is clearly faster. What happens when depends on counts of passes
    and on what `agree` gives alone, which is the choice of rank 0 (None: none yet), so that all ranks do the same."""

    candidates: Sequence[int]
    agree: Callable[[int | None], int | None]
    _passes: int = 0
    _stages: deque[_Stage] = field(default_factory=deque)
    _measured: dict[int, _Measured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._measured = {steps: _Measured() for steps in self.candidates}
        some = max(self.candidates)
        self._try(min(self.candidates), before=[_Stage(some, _FIRST_LOOK_PASSES)], after=[_Stage(some, _TRIAL_PASSES)])

    @property
    def current(self) -> int:
        return self._stages[0].steps

    def note(self, seconds: float, tokens: int) -> None:
        """A pass that took `seconds` and gave `tokens`."""
        self._passes += 1
        if self._passes > _SETTLING_PASSES:
            self._measured[self.current].note(seconds, tokens)
        if self._passes == self._stages[0].passes:
            self._passes = 0
            self._after(self._stages.popleft())

    def _after(self, ended: _Stage) -> None:
        if ended.held:
            self._try(next(steps for steps in self.candidates if steps != ended.steps))
        elif all(measured.passes for measured in self._measured.values()):
            chosen = self.agree(self._clearly_faster() if self._stages else self._faster())
            if chosen is not None:
                self._stages = deque([_Stage(chosen, _HELD_PASSES, held=True)])

    def _try(self, steps: int, before: Sequence[_Stage] = (), after: Sequence[_Stage] = ()) -> None:
        rest = _Stage(steps, _TRIAL_PASSES - _FIRST_LOOK_PASSES)
        self._stages = deque([*before, _Stage(steps, _FIRST_LOOK_PASSES), rest, *after])

    def _clearly_faster(self) -> int | None:
        none, some = min(self.candidates), max(self.candidates)
        ratio = self._measured[some].tokens_per_second / self._measured[none].tokens_per_second
        return some if ratio > _CLEAR else none if ratio < 1 / _CLEAR else None

    def _faster(self) -> int:
        """No drafts where they gain nothing."""
        none, some = min(self.candidates), max(self.candidates)
        gains = self._measured[some].tokens_per_second > _GAIN * self._measured[none].tokens_per_second
        return some if gains else none


class MeasuredSteps:
    """With the methods of SGLang's AdaptiveSpeculativeParams. Batch sizes are alike up to the next power of two."""

    def __init__(
        self,
        initial_steps: int,
        cfg_path: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        agree: Callable[[int | None], int | None] | None = None,
    ) -> None:
        self.candidate_steps = sorted({0, initial_steps})
        self._clock = clock
        self._agree = agree or _of_rank_zero
        self._sizes: dict[int, SizeChoice] = {}
        self._graph_sizes: list[int] | None = None
        self._last: tuple[int, float] | None = None

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self._graph_sizes = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Graphs of all sizes, whatever the steps."""
        return self._graph_sizes

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self._choice(batch_size).current

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """A pass over `batch_size` requests ended. SGLang asks for the steps before each pass, so nothing changes
        here."""
        now, size = self._clock(), _size_class(batch_size)
        if self._last is not None and self._last[0] == size:
            self._choice(batch_size).note(now - self._last[1], sum(num_correct_drafts_per_req) + batch_size)
        self._last = (size, now)
        return None

    def _choice(self, batch_size: int) -> SizeChoice:
        size = _size_class(batch_size)
        if size not in self._sizes:
            self._sizes[size] = SizeChoice(self.candidate_steps, self._agree)
        return self._sizes[size]


def _size_class(batch_size: int) -> int:
    return max(batch_size - 1, 0).bit_length()


def _of_rank_zero(steps: int | None) -> int | None:
    """Times differ between tensor-parallel ranks, which must run the same passes."""
    from sglang.srt.distributed import get_tp_group

    group: Any = get_tp_group()
    return group.broadcast_object(steps, src=0) if group.world_size > 1 else steps
