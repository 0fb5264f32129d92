"""What the package declares: its dependencies, its names, the environment variables it reads."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import msrnn

PACKAGE = Path(msrnn.__file__).parent
ROOT = PACKAGE.parent
NAMES = {"yaml": "pyyaml"}  # of distributions that are not called as what they install


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return {re.split(r"[\[<>=; ]", name)[0].lower() for names in (project["dependencies"], *extras) for name in names}


def imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - {"msrnn"} - sys.stdlib_module_names


def test_every_import_is_declared_as_a_dependency_or_an_extra() -> None:
    known = declared()
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in modules()
        for name in imported(tree)
        if NAMES.get(name, name.replace("_", "-")) not in known
    }
    assert not missing


def test_the_extra_of_the_harness_has_what_the_guides_use() -> None:
    """RULER, and models over HTTP (`--model local-completions`)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (harness,) = (name for name in project["optional-dependencies"]["lm-eval"] if name.startswith("lm-eval"))
    assert harness.startswith("lm-eval[api,ruler]")


def test_what_is_declared_has_a_pinned_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    unpinned = declared() - pinned - {"msrnn"}
    assert not unpinned


def test_the_oldest_versions_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = dict(re.findall(r"^(\w+)>=([\d.]+)$", "\n".join(project["dependencies"]), re.MULTILINE))
    tested = dict(re.findall(r"^(\w+)==([\d.]+)\.\d+$", (ROOT / "constraints-minimum.txt").read_text(), re.MULTILINE))
    assert {name: oldest[name] for name in ("torch", "transformers")} == {
        name: tested[name] for name in ("torch", "transformers")
    }


def test_the_environment_variables_that_are_read_are_named_for_contributors() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    constant = re.compile(r"[A-Z]+(_[A-Z]+)+|RANK")
    for path, tree in modules():
        if not any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in ast.walk(tree)):
            continue
        given = {key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}  # to others
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in given]
        for name in strings:
            if isinstance(name, str) and constant.fullmatch(name):
                assert f"`{name}`" in text, f"{path.relative_to(ROOT)} reads {name}"


def test_pages_count_the_fields_of_a_policy() -> None:
    count = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"][len(fields(msrnn.Policy))]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {
        word for page in pages for word in re.findall(r"(?:value|`Policy`)\s+with\s+(\w+)\s+fields", page.read_text())
    }
    assert found == {count}


def test_names_of_the_package() -> None:
    assert sorted(msrnn.__all__) == msrnn.__all__
    assert all(hasattr(msrnn, name) for name in msrnn.__all__)
    with pytest.raises(msrnn.UsageError, match="size"):
        msrnn.Size(0)
