"""Every module has a test file of its name: msrnn/engine/sessions.py has tests/engine/test_sessions.py.

A test of several modules, or of a command from end to end, may have a file with a name of its own as well.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "msrnn"
# Modules in which nothing runs.
WITHOUT_TESTS = {
    "backends/base": "the protocol of a backend; each backend is tested by its own name",
    "engine/executor": "the protocol of an executor; each executor is tested by its own name",
}


def modules() -> set[str]:
    """All modules but packages themselves, as paths without an ending."""
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    return {path.with_suffix("").as_posix() for path in paths}


def has_tests(module: str) -> bool:
    folder, _, name = module.rpartition("/")
    return (TESTS / folder / f"test_{name}.py").is_file()


def test_every_module_has_a_test_file_of_its_name() -> None:
    assert {module for module in modules() if not has_tests(module)} == WITHOUT_TESTS.keys()


def test_folders_of_tests_are_folders_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path("helpers")}
    assert [folder for folder in folders if not (PACKAGE / folder).is_dir()] == []
