"""Models: Hugging Face `config.json` -> `ModelDescription` -> Megatron modules."""
