"""transformers' AutoTokenizer, without what only models need."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlpipe.shared.replaced_parts import replaces

if TYPE_CHECKING:
    from transformers import AutoTokenizer

replaces(
    "transformers.utils:is_torch_available",
    why="where there is torch, AutoTokenizer's module imports the base class of models that generate, and with it "
    "torch's compiler and accelerate: a second of every run before it starts anything",
    drop_when="it imports that class where a model is loaded",
)
replaces(
    "transformers.models.auto.auto_factory:add_generation_mixin_to_remote_model",
    "transformers.models.auto.auto_factory:GenerationMixin",
    why="the one place that uses the class, for models whose code comes from the hub; it is imported there",
    drop_when="the replacement above goes",
)
_FACTORY = "transformers.models.auto.auto_factory"
_FINDS_TORCH = ("transformers.dynamic_module_utils", "transformers.models.auto.configuration_auto")
"""What that module imports and is to find torch as ever."""


def auto_tokenizer() -> "type[AutoTokenizer]":
    """The class. Models can be loaded in this process all the same, before and after."""
    if _FACTORY not in sys.modules:
        _import_factory()
    from transformers import AutoTokenizer

    return AutoTokenizer


def _import_factory() -> None:
    for name in _FINDS_TORCH:
        import_module(name)
    utils: Any = import_module("transformers.utils")
    found = utils.is_torch_available
    utils.is_torch_available = lambda: False
    try:
        factory: Any = import_module(_FACTORY)
    finally:
        utils.is_torch_available = found
    factory.is_torch_available = found
    add = factory.add_generation_mixin_to_remote_model

    def add_imported(model_class: type) -> Any:
        factory.GenerationMixin = import_module("transformers.generation").GenerationMixin
        return add(model_class)

    factory.add_generation_mixin_to_remote_model = add_imported
