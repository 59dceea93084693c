"""Version 2 of the transforms: the same names."""
