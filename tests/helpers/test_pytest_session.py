from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers import pytest_session

HANGS = """
import os, subprocess

def test():
    subprocess.Popen(["sleep", "1000"], process_group=0)
    print("started", flush=True)
    os._exit(3)
"""


def test_nothing_is_left_of_a_test_that_is_ended(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    program = Path(pytest_session.__file__)
    words: list[str | Path] = [sys.executable, program, "-s", "-p", "no:cacheprovider", tmp_path / "test_hangs.py"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sleep").symlink_to(shutil.which("sleep") or "")
    environment = {**os.environ, "PATH": str(tmp_path / "bin")}  # other programs may be missing
    # The output ends when the last process that could write to it has ended.
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 3
    assert "started" in done.stdout
