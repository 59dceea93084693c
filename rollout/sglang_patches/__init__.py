"""Everything that replaces parts of SGLang."""
