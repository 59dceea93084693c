"""Prompts: rows of files or hub data sets, rendered and tokenized, in an order that can be resumed."""

from rlpipe.data.prompts import PromptSet, load_prompts
from rlpipe.data.stream import PromptStream

__all__ = ["PromptSet", "PromptStream", "load_prompts"]
