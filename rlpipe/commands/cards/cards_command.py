"""`rlpipe cards`: the table of all cards, and one card whole."""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from rlpipe.commands.cards.card_files import CardState, card_states
from rlpipe.shared.errors import ConfigError


def cards_text(names: Sequence[str] = ()) -> str:
    """The table, or the cards of these names or kinds with all that is known of them. Raises ConfigError."""
    states = card_states()
    if not names:
        return "\n".join(_table(states))
    known = {state.name for state in states} | {state.kind for state in states}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            raise ConfigError(f"there is no card {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    chosen = [state for state in states if {state.name, state.kind} & set(names)]
    return "\n\n".join("\n".join(_whole(state)) for state in chosen)


def _table(states: Sequence[CardState]) -> Iterator[str]:
    """A line a card, grouped by kind, and how many stand how."""
    width = max(len(state.name) for state in states)
    for kind in dict.fromkeys(state.kind for state in states):
        yield kind
        for state in states:
            if state.kind == kind:
                yield f"  {state.name:{width}}  {state.status:12}  {_where(state)}".rstrip()
    counts = Counter(state.status for state in states)
    yield f"{len(states)} cards: " + ", ".join(f"{number} {status}" for status, number in counts.most_common())


def _where(state: CardState) -> str:
    newest = state.newest
    if newest is None:
        return ""
    devices = "+".join(dict.fromkeys(record.device for record in state.records))
    numbers = ", ".join(f"{name} {number}" for name, number in state.numbers().items())
    return f"{newest.date}  {newest.commit or 'no commit':9}  {devices:9}  {numbers}"


def _whole(state: CardState) -> Iterator[str]:
    yield f"{state.name} ({state.kind}): {state.status}"
    yield f"  claim     {state.card.claim}"
    yield f"  command   {state.card.command}"
    yield f"  code      {', '.join(state.card.code)}"
    for name, number in state.numbers().items():
        yield f"  number    {name}: {number}"
    for record in state.records:
        versions = ", ".join(f"{package} {version}" for package, version in record.versions.items())
        yield f"  record    {record.command}, {record.date}, commit {record.commit or 'unknown'}"
        yield f"            {record.host}; {versions}"
