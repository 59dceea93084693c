"""Hides Megatron-core from engines: a debugging module of SGLang imports it where it exists, which takes seconds."""

raise ImportError("engines do not use Megatron-core")
