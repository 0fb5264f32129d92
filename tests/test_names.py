"""Functions are named by verbs or nouns. A participle hides work: `computed()` may run for hours."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msrnn

PACKAGE = Path(msrnn.__file__).parent
REGULAR = re.compile(r"[a-z]{2,}ed")
IRREGULAR = re.compile(
    "begun|broken|built|chosen|done|drawn|found|given|gone|grown|held|hidden|kept|known|lent|lost|made|seen|sent|shown|"
    "spoken|taken|thrown|told|unknown|unread|unseen|written"
)
NOT_PARTICIPLES = {
    "embed": "a verb",
    "feed": "a verb",
    "need": "a verb",
    "seed": "a noun",
    "speed": "a noun",
}
ALLOWED = {
    "dequantized": "a cheap conversion, and a word of the definition that `tests/test_identities.py` states",
    "seen_at": "an accessor of a public value, as `evicted_at` is its field",
    "shared_memory": "a noun: the fast memory of a GPU's multiprocessor",
    "weighted_values": "one product of tensors in the definition's own terms",
}


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is read like a value."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_participle(name: str) -> bool:
    first = name.strip("_").partition("_")[0]
    return first not in NOT_PARTICIPLES and bool(REGULAR.fullmatch(first) or IRREGULAR.fullmatch(first))


def find_participles(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_property(node):
            continue
        if is_participle(node.name) and node.name.strip("_") not in ALLOWED:
            yield node.name, node.lineno


def test_no_function_is_named_by_a_participle() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line} {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, line in find_participles(path.read_text())
    ]
    assert not found, "\n".join(["name these functions by a verb:", *found])


def test_the_rule_itself() -> None:
    source = """
class Slots:
    def _grown(self): ...
    def grow(self): ...
    @property
    def divided(self): ...
    @cached_property
    def shown(self): ...
    async def parsed_line(self):
        def taken(): ...
def seed_of(): ...
def embed(): ...
def dequantized(): ...
"""
    assert {name for name, _ in find_participles(source)} == {"_grown", "parsed_line", "taken"}


def test_every_exception_is_used() -> None:
    names = {
        node.name.strip("_")
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert ALLOWED.keys() <= names
