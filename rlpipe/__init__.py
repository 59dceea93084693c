"""rlpipe: GRPO post-training with Ray, SGLang and Megatron-core. This package is the driver."""

__version__ = "0.1.0"
