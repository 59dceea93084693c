"""Credit by turns: returns from each turn on, compared over the turns at the same place in a group. numpy only.

Notation: episode i of a group takes turns t = 1..T_i with rewards r_(i,t), and R_i is what its score holds beyond them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlpipe.shared.sample import Episode
from rlpipe.shared.turn import Turn

Values = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class TurnTable:
    """`m` turns of a batch of episodes, in the order in which they were taken within each.

    episodes: int64 [m]. lines: int64 [m], a number for each agent of each episode. peers: int64 [m], a number for each
    place (first turn, second turn, ...) of each agent of each group. rewards: float64 [m]. spans: int64 [p, 4], where
    turns stand: turn, episode, first token, and the one after the last, in the response tokens of all branches of the
    episode laid end to end. A turn that several branches hold stands in each of them.
    """

    episodes: Numbers
    lines: Numbers
    peers: Numbers
    rewards: Values
    spans: Numbers

    @property
    def lone(self) -> int:
        """Turns that no other episode of the group has a counterpart to."""
        return int((np.bincount(self.peers)[self.peers] == 1).sum())


def turn_table(episodes: Sequence[Episode], groups: Numbers) -> TurnTable:
    """The turns of `episodes`; a sample without turns is one turn. groups: int64 [episodes]."""
    lines: dict[tuple[int, str], int] = {}
    peers: dict[tuple[int, str, int], int] = {}
    columns: list[tuple[int, int, int]] = []
    rewards: list[float] = []
    spans: list[tuple[int, int, int, int]] = []
    for number, episode in enumerate(episodes):
        places: Counter[str] = Counter()
        for standing in _turns_of(episode):
            turn, _ = standing[0]
            line = lines.setdefault((number, turn.agent), len(lines))
            peer = peers.setdefault((int(groups[number]), turn.agent, places[turn.agent]), len(peers))
            places[turn.agent] += 1
            spans += [(len(columns), number, before + one.start, before + one.end) for one, before in standing]
            columns.append((number, line, peer))
            rewards.append(turn.reward or 0.0)
    owners, own_lines, own_peers = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    return TurnTable(owners, own_lines, own_peers, np.array(rewards), np.array(spans, dtype=np.int64).reshape(-1, 4))


def _turns_of(episode: Episode) -> list[list[tuple[Turn, int]]]:
    """The turns in the order in which they were taken, each as often as branches hold it, with the response tokens of
    the branches before that one."""
    found: dict[tuple[int, int], list[tuple[Turn, int]]] = {}
    before = 0
    for branch, sample in enumerate(episode):
        for turn in sample.turns:
            found.setdefault((turn.number, 0), []).append((turn, before))
        if not sample.turns:
            found[branch, 1] = [(Turn(0, sample.response_tokens), before)]
        before += sample.response_tokens
    return [found[place] for place in sorted(found)]


def turn_returns(table: TurnTable, outcomes: Values, discount: float) -> Values:
    """G_(i,t) = r_(i,t) + discount * G_(i,t+1), where the last turn of each agent also earns R_i: float64 [m].

    outcomes: float64 [m], R_i of the turn's episode. An agent is not credited with the rewards of another one's turns.
    """
    returns = np.empty_like(table.rewards)
    following: dict[int, float] = {}
    for index in range(len(returns) - 1, -1, -1):
        line = int(table.lines[index])
        later = discount * following[line] if line in following else outcomes[index]
        returns[index] = following[line] = table.rewards[index] + later
    return returns


def leave_one_out(returns: Values, peers: Numbers) -> Values:
    """G_(i,t) less the mean over the other episodes of the group that have a turn t; 0 where none has: float64 [m]."""
    counts = np.bincount(peers)[peers]
    return _centred(returns, peers) * counts / np.maximum(counts - 1, 1)


def normalized(returns: Values, peers: Numbers, epsilon: float) -> Values:
    """(G_(i,t) - mean) / (unbiased std + epsilon) over the episodes of the group that have a turn t: float64 [m]."""
    centred = _centred(returns, peers)
    squares = np.bincount(peers, weights=centred**2)
    std = np.sqrt(squares / np.maximum(np.bincount(peers) - 1, 1))[peers]
    return centred / (std + epsilon)


def token_values(table: TurnTable, values: Values, episodes: Sequence[Episode]) -> tuple[Values, ...]:
    """The turn's value at each of its tokens, 0 elsewhere: float64 [response tokens] for each episode."""
    tokens = [np.zeros(sum(sample.response_tokens for sample in episode)) for episode in episodes]
    for turn, episode, start, end in table.spans:
        tokens[episode][start:end] = values[turn]
    return tuple(tokens)


def _centred(returns: Values, peers: Numbers) -> Values:
    """Exactly 0 where all are equal, whatever rounding the mean has."""
    count = int(peers.max()) + 1
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, peers, returns)
    np.maximum.at(high, peers, returns)
    means = np.bincount(peers, weights=returns) / np.bincount(peers)
    return np.where((low == high)[peers], 0.0, returns - means[peers])
