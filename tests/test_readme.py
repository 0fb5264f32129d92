"""The README's snippets run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from msrnn.policy import NAMES

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.small_model
@pytest.mark.usefixtures("small")
def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(snippets) >= 2
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), names)
    assert (tmp_path / "book.safetensors").exists()
    printed = capsys.readouterr().out
    assert "The captain opened the door and" in printed
    assert "torch.Size([1, 30, 1, " in printed


def test_every_policy_has_its_row() -> None:
    text = README.read_text()
    for name, policy in NAMES.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        _, decay, per, first, recent, value, _ = [cell.strip() for cell in row.strip("|").split("|")]
        assert decay == ("none" if policy.decay is None else f"{policy.decay:g}")
        assert (per, int(first)) == (policy.per, policy.first)
        assert recent.replace("half", "0.5") == (f"{policy.recent:g} of size" if policy.recent else "0")
        assert value == ("yes" if policy.value_norm else "")
