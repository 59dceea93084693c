"""Import-only stand-in for torchvision: text models never call it."""

__version__ = "0.28.0"


def absent(*arguments, **keywords):
    """Stands for every function."""
    raise NotImplementedError("torchvision is not available to engines without a GPU")
