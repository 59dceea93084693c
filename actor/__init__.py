"""The Megatron-core actor: models, training, log-probabilities, checkpoints, weight export."""
