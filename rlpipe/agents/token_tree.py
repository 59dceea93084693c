"""An episode as a tree of token sequences: what the policy read and wrote, each token kept as it was sampled."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from rlpipe.agents.messages import Message
from rlpipe.generation.response_seeds import sequence_digest
from rlpipe.shared.sample import Episode, Prompt, Sample, Status, VersionSpan
from rlpipe.shared.turn import Turn
from rollout.partial_response import PartialResponse, merged_spans
from rollout.reported_routes import joined_routes
from rollout.requests import Generation


@dataclass(eq=False)
class Node:
    """One response of the policy: `context_ids`, which it read after its parent's tokens, then what it sampled.

    `answer_id` names the answer that held it, perhaps beside other choices; `reward`: what it earned by itself.
    `messages` are those that came with this request, and the reply; `history` is a digest of all messages up to the
    reply. `cut_off`: a limit of the run ended the response, or leaves no room after it. `order` counts the responses of
    the episode; `claimed`: a request went on from here, `agent_seconds` after the reply.
    """

    parent: "Node | None"
    context_ids: tuple[int, ...]
    generation: Generation
    answer_id: str = ""
    messages: tuple[Message, ...] = ()
    history: bytes = b""
    reward: float | None = None
    cut_off: bool = False
    order: int = 0
    claimed: bool = False
    agent_seconds: float = 0.0
    answered_at: float = 0.0
    children: list["Node"] = field(default_factory=list)

    @cached_property
    def tokens(self) -> int:
        """Of the whole sequence up to the end of this response."""
        before = 0 if self.parent is None else self.parent.tokens
        return before + len(self.context_ids) + len(self.generation.token_ids)

    @cached_property
    def digest(self) -> bytes:
        """Of the whole sequence up to the end of this response."""
        before = b"" if self.parent is None else self.parent.digest
        return sequence_digest(before, self.context_ids + self.generation.token_ids)

    def claim(self) -> None:
        """A request goes on from here."""
        if not self.claimed:
            self.agent_seconds = time.monotonic() - self.answered_at
        self.claimed = True

    def path(self) -> list["Node"]:
        """From the root to this node."""
        node: Node | None = self
        nodes = []
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def token_ids(self) -> tuple[int, ...]:
        """The whole sequence up to the end of this response."""
        token_ids: list[int] = []
        for node in self.path():
            token_ids += node.context_ids
            token_ids += node.generation.token_ids
        return tuple(token_ids)

    def dialogue(self) -> list[Message]:
        """All messages up to the reply."""
        return [message for node in self.path() for message in node.messages]


class TokenTree:
    """The nodes of one episode. Its leaves are the episode's samples."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._added = 0

    def add(self, node: Node) -> Node:
        node.order = self._added
        node.answered_at = time.monotonic()
        self._added += 1
        self.nodes.append(node)
        if node.parent is not None:
            node.parent.children.append(node)
        return node

    def leaves(self) -> list[Node]:
        """In the order in which the policy wrote them."""
        return [node for node in self.nodes if not node.children]

    def forget(self, gone: Callable[[Node], bool]) -> None:
        """Takes nodes away that nothing went on from."""
        for node in [node for node in self.nodes if gone(node) and not node.children]:
            self.nodes.remove(node)
            if node.parent is not None:
                node.parent.children.remove(node)

    @property
    def written(self) -> PartialResponse:
        """All that was sampled, each token once, in the order of writing."""
        generations = [node.generation for node in self.nodes]
        return PartialResponse(
            tuple(token for one in generations for token in one.token_ids),
            tuple(value for one in generations for value in one.logprobs),
            merged_spans(tuple(span for one in generations for span in one.versions)),
        )

    def samples(self, episode_id: str, group_id: str, prompt: Prompt, temperature: float) -> Episode:
        """A sample for each leaf. Of branches that share a response, the one that was written last trains it."""
        leaves = self.leaves()
        trained_in = {node.order: index for index, leaf in enumerate(leaves) for node in leaf.path()}
        return tuple(
            replace(
                _sample(leaf, [trained_in[node.order] == index for node in leaf.path()], prompt),
                sample_id=episode_id if len(leaves) == 1 else f"{episode_id}.{index}",
                episode_id="" if len(leaves) == 1 else episode_id,
                group_id=group_id,
                temperature=temperature,
            )
            for index, leaf in enumerate(leaves)
        )


def _sample(leaf: Node, trained: Sequence[bool], prompt: Prompt) -> Sample:
    path = leaf.path()
    token_ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    turns: list[Turn] = []
    routes = None
    for node, own in zip(path, trained, strict=True):
        context = node.context_ids if node.parent is not None else ()
        token_ids += (*context, *node.generation.token_ids)
        logprobs += (*((0.0,) * len(context)), *node.generation.logprobs)
        mask += (*((0,) * len(context)), *((int(own),) * len(node.generation.token_ids)))
        start = len(token_ids) - len(node.generation.token_ids)
        turns.append(
            Turn(
                start=start,
                end=len(token_ids),
                number=node.order,
                reward=node.reward,
                model_seconds=node.generation.seconds,
                tool_seconds=node.agent_seconds,
            )
        )
        routes = joined_routes(routes, node.generation.routes)
    replies = [node.messages[-1].content for node in path if node.messages]
    return Sample(
        sample_id="",
        group_id="",
        prompt=replace(prompt, token_ids=path[0].context_ids),
        response_ids=tuple(token_ids),
        response_text=replies[-1] if replies else "",
        rollout_logprobs=tuple(logprobs),
        loss_mask=tuple(mask),
        versions=merged_spans(tuple(_spans(path))),
        status=Status.TRUNCATED if leaf.cut_off else Status.COMPLETED,
        engine=leaf.generation.engine,
        routes=routes,
        turns=tuple(turns),
        shared_tokens=sum(len(node.generation.token_ids) for node, own in zip(path, trained, strict=True) if not own),
        metadata={
            "generate_seconds": sum(node.generation.seconds for node in path),
            "retractions": sum(node.generation.retractions for node in path),
            "writes": len(path),
        },
    )


def _spans(path: Sequence[Node]) -> Iterator[VersionSpan]:
    """Of all response tokens; what the policy read counts to the weights that wrote before."""
    yield from path[0].generation.versions
    for before, node in pairwise(path):
        yield VersionSpan(before.generation.versions[-1].version, len(node.context_ids))
        yield from node.generation.versions
