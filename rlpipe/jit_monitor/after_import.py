"""Run a function right after a module is first imported, so that a hook is in place before the module compiles."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """A finder in front of the others that finds nothing itself: it watches for the modules it was asked about."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callback]] = {}

    def call(self, module_name: str, callback: Callback) -> None:
        """Call `callback(module)` now if the module is imported, else once it is, in the order of these calls."""
        module = sys.modules.get(module_name)
        if module is not None:
            callback(module)
            return
        self._waiting.setdefault(module_name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Forget what has not been imported."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callbacks = self._waiting.pop(fullname, None)
        if callbacks is None:
            return None
        # The name is no longer waited for, so the other finders answer this one.
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self._waiting[fullname] = callbacks
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            for callback in callbacks:
                callback(module)

        # An attribute of this one loader: the module keeps its own loader, which `inspect` and resources rely on.
        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
