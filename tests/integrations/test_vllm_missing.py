"""The plug-in where vLLM is not installed."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import pytest


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, *others: Any) -> ModuleSpec | None:
        return None if name == "vllm" else found(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.delitem(sys.modules, "msrnn.integrations.vllm", raising=False)
    with pytest.raises(ImportError, match=r"vLLM is not installed .*: pip install 'msrnn\[vllm\]'"):
        importlib.import_module("msrnn.integrations.vllm")
