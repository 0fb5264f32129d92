"""Missing packages and files are told at once: before torch is imported, and so before any model is loaded."""

from __future__ import annotations

import json
import subprocess
import sys

NO_DATASETS = {
    "eval qasper": "allenai/qasper is loaded by the package datasets, which is not installed",
    "eval squality --stage answer": "pszemraj/SQuALITY-v1.3 is loaded by the package datasets, which is not installed",
    "eval perplexity": "PG-19 is loaded by the package datasets, which is not installed",
    "eval extrapolation": "PG-19 is loaded by the package datasets, which is not installed",
    "budget": "PG-19 is loaded by the package datasets, which is not installed",
}
NO_FILE = {
    "eval qasper --data none.json": "none.json: no such file",
    "eval perplexity --text none.txt": "none.txt: no such file or folder",
    "eval extrapolation --text none.txt": "none.txt: no such file or folder",
    "eval retrieval --text none.txt": "none.txt: no such file or folder",
    "eval chat-memory none.json": "none.json: no such file",
    "budget --text none.txt": "none.txt: no such file or folder",
    "analyze --text none.txt": "none.txt: no such file or folder",
    "demo --text none.txt": "none.txt: No such file or directory",
    "read none.txt --save none.state": "none.txt: No such file or directory",
    "explore none.txt": "none.txt: no such file",
}
NO_PACKAGE = {
    "serve": "the package uvicorn is not installed: pip install 'msrnn[serve]'",
}
MISSING = ("datasets", "uvicorn")
CODE = f"""
import importlib.util, json, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {MISSING} else found(name, *rest)
from msrnn.cli import main
for line in json.loads(sys.argv[1]):
    code = main([*line.split(), "--model", "/none/such"])
    print(json.dumps([line, code, "torch" in sys.modules]), file=sys.stderr)
"""


def test_missing_packages_and_files_are_told_at_once() -> None:
    expected = NO_DATASETS | NO_FILE | NO_PACKAGE
    words = [sys.executable, "-c", CODE, json.dumps(list(expected))]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = ran.stderr.splitlines()
    told = dict(zip(expected, lines[::2], strict=True))
    assert [line for line, reason in expected.items() if not told[line].startswith(f"msrnn: {reason}")] == []
    assert [json.loads(line)[1:] for line in lines[1::2]] == [[2, False]] * len(expected)
