"""What SGLang's files say, for processes that must not import it: that takes half a minute and a gigabyte."""

import ast
import importlib.util
from pathlib import Path


def sglang_folder() -> Path:
    """Where the installed package lies; ModuleNotFoundError where it is not."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def declared_server_arguments() -> frozenset[str]:
    """Fields of `sglang.srt.server_args.ServerArgs`, as its source declares them."""
    tree = ast.parse((sglang_folder() / "srt" / "server_args.py").read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs")
    return frozenset(
        line.target.id
        for one in classes
        for line in one.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and "ClassVar" not in ast.dump(line)
    )
