"""Plants a defect into every process that starts with this folder in its PYTHONPATH: a text in a module's source is
replaced when the module is imported. Which one, the variable RLPIPE_PLANTED says, as JSON."""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path

_PLANTED = json.loads(os.environ.get("RLPIPE_PLANTED") or "null")


class _ChangedSource(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        source = Path(self.path).read_text()
        if source.count(_PLANTED["old"]) != 1:
            raise ImportError(f"planted defect: the text to be replaced is not once in {self.path}")
        Path(_PLANTED["marks"], str(os.getpid())).touch()
        return compile(source.replace(_PLANTED["old"], _PLANTED["new"]), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != _PLANTED["module"]:
            return None
        file = _PLANTED["file"]
        return importlib.util.spec_from_file_location(fullname, file, loader=_ChangedSource(fullname, file))


if _PLANTED is not None:
    sys.meta_path.insert(0, _Finder())
