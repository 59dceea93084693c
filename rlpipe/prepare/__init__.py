"""What a run may make before it starts, from its seed alone: a tiny policy, its tokenizer, a generated task."""

from rlpipe.prepare.all import prepare

__all__ = ["prepare"]
