"""Which experts an engine sent each token to, as SGLang reports it: all tokens but the last, which is never fed."""

import base64
from typing import Any

import numpy as np

from rlpipe.shared.expert_routes import Routes


def decoded_routes(meta: dict[str, Any], tokens: int, shape: tuple[int, int]) -> Routes | None:
    """Routes of a sequence of `tokens` tokens out of SGLang's meta_info; None where it has none.

    shape: layers and experts per token. Raises ValueError when SGLang returned another number of values.
    """
    encoded = meta.get("routed_experts")
    if encoded is None:
        return None
    values = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    return values.reshape(max(tokens - 1, 0), *shape).astype(np.int16)


def joined_routes(before: Routes | None, after: Routes | None) -> Routes | None:
    """Routes of a sequence that went on: those of its first tokens are the ones that they were first generated with."""
    if before is None or after is None:
        return before if after is None else after
    return np.concatenate([before, after[len(before) :]])
