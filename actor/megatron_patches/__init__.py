"""Everything that replaces parts of Megatron."""
