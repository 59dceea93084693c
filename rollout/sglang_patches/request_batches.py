"""All requests of one turn of the event loop reach SGLang's scheduler in one message."""

import asyncio
from typing import Any

from rlpipe.shared.replaced_parts import relies_on, replaces

replaces(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._send_one_request",
    why="sent one by one, requests start in many small passes",
    drop_when="SGLang gathers the requests of one turn of the event loop",
)
relies_on(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._send_batch_request",
    why="it sends several requests in one message",
    drop_when="SGLang gathers the requests of one turn of the event loop",
)


class RequestBatches:
    """Sends in place of an SGLang TokenizerManager, which sends each request on its own unless one caller has them all.

    Sent one by one, a few prompts are computed while the others are still on their way: so many passes over few
    prompts, and so many more steps until the last request, which came last, is answered.
    """

    def __init__(self, tokenizer_manager: Any) -> None:
        self._send_batch = tokenizer_manager._send_batch_request
        self._waiting: list[Any] = []
        tokenizer_manager._send_one_request = self._add

    def send(self) -> None:
        """Sends what waits now, for instance because an abort follows that must not overtake it."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._send_batch(waiting)

    def _add(self, request: Any) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.send)
        self._waiting.append(request)
