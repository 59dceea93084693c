"""Models: Hugging Face `config.json` -> `TrainableModel` -> Megatron modules."""
