"""The harness's command where the harness is not installed."""

from __future__ import annotations

import runpy
import sys

import pytest


def test_the_command_is_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", ["msrnn.integrations.lm_eval", "--model", "msrnn", "--tasks", "hellaswag"])
    monkeypatch.delitem(sys.modules, "msrnn.integrations.lm_eval", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("msrnn.integrations.lm_eval", run_name="__main__")
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "pip install 'msrnn[lm-eval]'" in err
