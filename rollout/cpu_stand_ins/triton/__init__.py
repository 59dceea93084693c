"""Import-only stand-in for Triton: kernels can be defined, never launched.

Any submodule and any attribute exists. A name that starts with a capital is a class, others are objects that act as
module, decorator and data type at once, which is all that module-level code does with them.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.7.1"


class Kernel:
    """What `@triton.jit` makes here: a name to pass around. Launching it is an error."""

    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__module__ = getattr(function, "__module__", __name__)

    def __getitem__(self, grid):
        raise NotImplementedError(f"Triton kernel {self.__module__}.{self.__name__} cannot run without a GPU")

    def __call__(self, *arguments, **keywords):
        return self[None]


class Stub(types.ModuleType):
    """A module of which every attribute exists."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        return _attribute(self, name)

    def __contains__(self, item):
        """Asked of Triton's backends, by torch: there is none."""
        return False

    def __or__(self, other):
        """In an annotation."""
        return self

    __ror__ = __or__

    def __call__(self, *arguments, **keywords):
        """Bare decorator, decorator factory, or a call whose value nobody looks at."""
        if len(arguments) == 1 and callable(arguments[0]) and not keywords:
            return arguments[0]
        return lambda function: function


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `import triton.anything` succeed."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        """Nothing to run: attributes appear when they are asked for."""


def _attribute(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    qualified = f"{module.__name__}.{name}"
    if name[0].isupper():
        base = Exception if name.endswith(("Error", "Resources")) else object
        value = type(name, (base,), {"__init__": lambda self, *arguments, **keywords: None})
    else:
        value = sys.modules.get(qualified) or Stub(qualified)
    setattr(module, name, value)
    return value


def jit(function=None, **options):
    """`@triton.jit` with and without arguments."""
    return Kernel if function is None else Kernel(function)


def autotune(*arguments, **options):
    return lambda kernel: kernel


heuristics = autotune


def cdiv(dividend, divisor):
    """Division rounded up; host code sizes grids with it."""
    return -(dividend // -divisor)


def next_power_of_2(number):
    return 1 << (number - 1).bit_length() if number > 0 else 1


def __getattr__(name):
    return _attribute(sys.modules[__name__], name)


sys.meta_path.insert(0, _StubFinder())
