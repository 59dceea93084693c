"""Configuration: typed sections, YAML composition, dotted overrides. Imports neither torch nor ray."""
