from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'msrnn[lm-eval]'")

from msrnn.integrations import lm_eval_options


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ("--model msrnn --tasks x", True),
        ("run -M msrnn --tasks x", True),
        ("--model msrnn --device cuda:0", False),
        ("--model hf --tasks x", False),
        ("--tasks x", False),
        ("--config FILE", True),
        ("--config FILE --model hf", False),
        ("--config WITH", False),
        ("--config none --model msrnn", True),
    ],
)
def test_a_device_is_added_where_none_is_named(words: str, added: bool, tmp_path: Path) -> None:
    files = {"FILE": "model: msrnn", "WITH": "model: msrnn\ndevice: cuda:0"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        words = words.replace(name, str(tmp_path / name))
    given = words.split()
    assert lm_eval_options.with_device(given) == given + ["--device", "auto"] * added
