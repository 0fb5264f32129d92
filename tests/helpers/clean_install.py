"""The package as its users get it: `make package` builds it and runs the README with it in a clean environment.

Wheel and sdist are built into a temporary folder and checked: they have every file that the package needs. The wheel is
then installed into a new environment, which sees nothing of this repository, and runs the README's Python and commands.
The small default model takes the place of SmolLM2's name on the hub, so the hub is not asked.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BOOK = "The captain opened the door and looked at the sea. It was a dark and stormy night, and nobody slept. " * 20
IN_SDIST = {
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "constraints-minimum.txt",
    "constraints-vllm.txt",
    "pyproject.toml",
    "tests/conftest.py",
}
IS_INSTALLED = "import msrnn, sys; sys.exit(not msrnn.__file__.startswith(sys.prefix))"
SMALL_FOLDER = "from msrnn.hf.loading import small_model; print(small_model())"


class Environment:
    """A new virtual environment; its programs do not see this one, nor the repository."""

    def __init__(self, folder: Path, work: Path) -> None:
        venv.create(folder, with_pip=True)
        self._bin, self._work = folder / "bin", work
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self._variables = {name: value for name, value in os.environ.items() if name not in hidden}

    def run(self, program: str, *arguments: str | Path) -> str:
        """Run a program of the environment; returns what it prints, and ends this script if it fails."""
        print(program, *(str(argument)[:100].splitlines()[0] for argument in arguments), flush=True)
        command = [self._bin / program, *arguments]
        done = subprocess.run(command, cwd=self._work, env=self._variables, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout}\n{program}: exit status {done.returncode}")
        return done.stdout

    def install(self, *packages: str) -> None:
        self.run("pip", "install", "-q", "-c", CONSTRAINTS, *packages)


def build(environment: Environment, folder: Path) -> Path:
    """Build sdist and wheel, and check both; returns the wheel."""
    environment.install("build", "twine")
    environment.run("python", "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    environment.run("twine", "check", "--strict", wheel, sdist)
    with zipfile.ZipFile(wheel) as archive:
        check_contents(wheel, package_files(), set(archive.namelist()))
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        check_contents(sdist, package_files() | IN_SDIST, names)
    return wheel


def package_files() -> set[str]:
    """All files of the package: modules, pages, styles, `py.typed`."""
    files = (path for path in (ROOT / "msrnn").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in files}


def check_contents(archive: Path, expected: set[str], found: set[str]) -> None:
    if missing := expected - found:
        sys.exit(
            f"{archive.name} lacks {', '.join(sorted(missing))}: see package-data in pyproject.toml, and MANIFEST.in"
        )


def run_readme(environment: Environment, work: Path) -> None:
    """The README's snippets, one after the other in one process, and its commands that end by themselves."""
    environment.run("python", "-c", IS_INSTALLED)
    environment.run("msrnn", "download")
    folder = environment.run("python", "-c", SMALL_FOLDER).strip()
    text = (ROOT / "README.md").read_text()
    program = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)).replace(SMALL, folder)
    (work / "book.txt").write_text(BOOK)
    print(environment.run("python", "-c", program))
    for line in re.findall(r"^msrnn ((?:read|generate) .*)$", text, re.MULTILINE):
        print(environment.run("msrnn", *shlex.split(line, comments=True)))


def main() -> None:
    with TemporaryDirectory() as temporary:
        top = Path(temporary)
        for name in ("work", "dist"):
            (top / name).mkdir()
        wheel = build(Environment(top / "tools", top / "work"), top / "dist")
        clean = Environment(top / "clean", top / "work")
        clean.install(str(wheel))
        clean.run("pip", "check")
        run_readme(clean, top / "work")


if __name__ == "__main__":
    main()
