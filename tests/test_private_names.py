"""A name with an underscore belongs to its module: no other one uses it, and no class poses as another.

In the engine, such a name belongs to its object: only `self` has it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msrnn

ROOT = Path(msrnn.__file__).parent
TUPLES = {"_replace", "_asdict"}  # public methods of named tuples
OTHERS = {  # of torch and transformers, which have no public name for it
    "_attn_implementation",
    "_dynamo",
    "_foreach_copy_",
    "_from_model_config",
    "_tp_size",
    "_version",
}


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in TUPLES | OTHERS


def is_own(value: ast.expr) -> bool:
    """Whether it is the object that the code belongs to."""
    return ast.unparse(value) in ("self", "cls", "super()")


def used(tree: ast.AST) -> Iterator[str]:
    """Private names of other objects and modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("msrnn"):
            yield from (alias.name for alias in node.names if is_private(alias.name))


def defined(tree: ast.AST) -> set[str]:
    """The private names that a module makes itself."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_no_module_uses_a_private_name_of_another() -> None:
    found: dict[str, set[str]] = {}
    for path, tree in trees().items():
        own = set() if path.startswith("engine/") else defined(tree)
        if names := {*used(tree)} - own:
            found[path] = names
    assert found == {}


def test_no_object_poses_as_another() -> None:
    """No class is assigned, and no class forwards what it does not have."""
    found = []
    for path, tree in trees().items():
        methods = [part for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body]
        names = {"__getattr__", "__getattribute__"}
        forwards = [part.lineno for part in methods if isinstance(part, ast.FunctionDef) and part.name in names]
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "__class__"]
        assigned = [node.lineno for node in classes if isinstance(node.ctx, ast.Store)]
        found += [f"{path}:{line}" for line in forwards + assigned]
    assert found == []


def test_what_is_found() -> None:
    """The rules find what they are for."""
    code = "from msrnn.core.state import _compare\nstate._row(0)\nself._mine = state._x\ntorch._dynamo\nother._mine\n"
    tree = ast.parse(code)
    assert {*used(tree)} == {"_compare", "_row", "_x", "_mine"}
    assert defined(tree) == {"_mine"}
