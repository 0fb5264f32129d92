"""Each module imports only from those above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import msrnn

ORDER = [
    "version",
    "policy",
    "positions",
    "reference",
    "scoring",
    "backend",
    "atomic",
    "files",
    "memory",
    "rounding",
    "slots",
    "validate",
    "state",
    "kernels",
    "scan",
    "walk",
    "chunk",
    "decode",
    "attention",
    "masks",
    "huggingface",
    "probe",
    "rotary",
    "plan",
    "graph",
    "generation",
    "rnn",
    "models",
    "turns",
    "tracing",
    "harness",
    "evaluate",
    "analyze",
    "cli",
]
ROOT = Path(msrnn.__file__).parent


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "msrnn":
            parts = node.module.split(".")[1:]
            names |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("msrnn.")}
    return names & set(ORDER)


def test_each_module_imports_only_from_those_above_it() -> None:
    paths = [p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py"]
    assert {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in paths} == set(ORDER)
    for path in paths:
        mine = path.relative_to(ROOT).parts[0].removesuffix(".py")
        below = {name for name in imported(path) - {mine} if ORDER.index(name) > ORDER.index(mine)}
        assert not below, f"{path.name} imports {below}"


def test_importing_the_package_does_not_load_torch() -> None:
    code = (
        "import msrnn, sys; assert 'torch' not in sys.modules; msrnn.MultiStateRNN, msrnn.trace, msrnn.policy('tova')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
