"""Supervised training by the actor: `rlpipe sft`, and the warm start before GRPO."""
