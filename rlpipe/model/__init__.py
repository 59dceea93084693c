"""What a model folder's config.json says."""
