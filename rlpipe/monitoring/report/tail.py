"""What waiting for the last responses of an iteration costs, and what each setting would have saved."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, takewhile

from rlpipe.monitoring.report.history import History
from rlpipe.monitoring.report.html import table
from rlpipe.monitoring.report.tail_replay import Replayed, Setting, replay
from rlpipe.monitoring.response_record import ResponseRecord

_OVERSAMPLING = (1.25, 1.5)
_MOST_RESPONSES = 8192
_LOST_SHARE = 0.15
_WORTHWHILE_SHARE = 0.05


@dataclass(frozen=True)
class Choice:
    """A setting by its keys, and what a replay of the recorded lengths says of it."""

    name: str
    setting: Setting
    replayed: Replayed

    def saved_share(self, now: "Choice") -> float:
        """Of the seconds of generation."""
        return 1.0 - self.replayed.seconds / now.replayed.seconds


def tail_table(history: History) -> str:
    """Each setting with its replay, as the run was first; nothing where lengths were not recorded."""
    choices = _choices(history)
    if not choices:
        return ""
    now = choices[0]
    rows = [
        [
            f"{choice.name} (this run)" if choice is now else choice.name,
            f"{choice.replayed.seconds:.1f}",
            "" if choice is now else f"{choice.saved_share(now):.0%}",
            f"{choice.replayed.lost_share:.0%}",
            f"{choice.replayed.dropped_share:.0%}",
            f"{choice.replayed.trained_tokens:,.0f}",
        ]
        for choice in choices
    ]
    header = ["rollout", "seconds", "saved", "room lost", "tokens thrown away", "tokens of a trained response"]
    shape = history.responses[-1].shape
    engines = "an engine" if shape.engines == 1 else f"each of {shape.engines} engines"
    note = (
        f"<p class='quiet'>Generation of an iteration, replayed from recorded lengths: {shape.wanted} groups, up to "
        f"{shape.running} responses at a time on {engines}, at the pace that was measured. Where responses are thrown "
        "away, the trained ones are those that ended soon.</p>"
    )
    return note + table(header, rows, text_columns=[0])


def tail_advice(history: History) -> list[str]:
    """One sentence where a setting would save time that the tail takes, and does not train short responses alone."""
    choices = _choices(history)
    if not choices or choices[0].replayed.lost_share < _LOST_SHARE:
        return []
    now = choices[0]
    able = [choice for choice in choices if not choice.setting.known and not choice.setting.throws_away]
    best = min(able, key=lambda choice: choice.replayed.seconds)
    if best.saved_share(now) < _WORTHWHILE_SHARE:
        return []
    return [
        f"Waiting for the last responses leaves {now.replayed.lost_share:.0%} of the engines' room empty: by the "
        f"recorded lengths, generation would take {best.saved_share(now):.0%} less with {best.name} (see The tail)."
    ]


def _choices(history: History) -> Sequence[Choice]:
    return _replayed(_newest(history.responses)) if history.responses else ()


@lru_cache(maxsize=4)  # the page shows both the advice and the table
def _replayed(records: tuple[ResponseRecord, ...]) -> tuple[Choice, ...]:
    shape = records[-1].shape
    now = Setting(shape.longest_first, shape.oversampling, shape.partial, migration=shape.migration)
    others = [replace(now, longest_first=True), replace(now, longest_first=False), replace(now, known=True)]
    others += [Setting(now.longest_first, share, partial) for partial in (False, True) for share in _OVERSAMPLING]
    if shape.engines > 1:
        others.append(replace(now, migration=True))
    settings = list(dict.fromkeys([now, *others]))
    return tuple(Choice(_name(setting), setting, replay(records, setting)) for setting in settings)


def _name(setting: Setting) -> str:
    order = "longest_first" if setting.longest_first else "arrival"
    parts = ["longest first by true lengths" if setting.known else f"request_order: {order}"]
    if setting.oversampling > 1:
        parts.append(f"oversampling: {setting.oversampling:g}")
    if setting.partial:
        parts.append("partial: true")
    if setting.migration:
        parts.append("migration: true")
    return ", ".join(parts)


def _newest(records: Sequence[ResponseRecord]) -> tuple[ResponseRecord, ...]:
    """As many as a page has time for, from those of one shape."""
    alike = takewhile(lambda record: record.shape == records[-1].shape, reversed(records))
    sizes = accumulate((record.responses for record in reversed(records)), initial=0)
    kept = [record for record, before in zip(alike, sizes, strict=False) if before < _MOST_RESPONSES]
    return tuple(reversed(kept))
