"""The rule past the training length."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import msrnn
from msrnn.cli.eval_extrapolation import ROWS
from msrnn.errors import UsageError
from msrnn.hf.extension import REACH, extend_policy, extension, largest_size, training_length
from msrnn.size import joint_name, parse_policy
from tests.helpers.tiny import FAMILIES, build, llama


@pytest.mark.parametrize(
    ("policy", "size", "length", "expected"),
    [
        ("echo", 512, 8192, "echo+1~2048"),  # measured, with both lengths
        ("echo", 512, 32768, "echo+1~2048"),
        ("tova", 16, 200, "tova+1~64"),
        ("tova", 150, 200, "tova+1~200"),  # four times the size is longer than the model was trained for
        ("window+4", 16, 200, "window+4~64"),
        ("echo+1~100", 16, 200, "echo+1~100"),
        ("echo~100", 16, 200, "echo+1~100"),
        ("h2o:upper", 16, 200, "h2o+1~64:upper"),
    ],
)
def test_the_rule(policy: str, size: int, length: int, expected: str) -> None:
    assert extension(policy, size, length) == (expected, "compressed")
    value, budget = parse_policy(policy)
    assert joint_name(extend_policy(value, size, length), budget) == expected


def test_the_rule_is_the_row_that_was_measured() -> None:
    assert ROWS[-1].format(horizon=REACH * 512) == "@".join(extension("echo", 512, 8192))


@pytest.mark.parametrize(
    ("policy", "size", "message"),
    [
        ("full", 16, "policy 'full' keeps every token; use a bounded policy"),
        ("tova", 200, "size=200 is not below the 200 tokens that this model was trained on; use a smaller size"),
    ],
)
def test_what_cannot_follow_the_rule(policy: str, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        extension(policy, size, 200)


def test_what_a_model_says_about_itself() -> None:
    model = build(llama(max_position_embeddings=64))
    assert training_length(model) == 64
    assert training_length(build(FAMILIES["gpt2"]())) == 512
    assert largest_size(msrnn.MultiStateRNN(model, "tova", [7, 9]).spec) == 9
    assert largest_size(msrnn.MultiStateRNN(model, "full", None).spec) == 0
    for unknown in (None, "many", 0, True):
        text = SimpleNamespace(max_position_embeddings=unknown)
        other: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder, text=text: text))
        assert training_length(other) is None


def test_the_rule_does_not_load_torch() -> None:
    """Help texts have its numbers."""
    code = "import sys, msrnn.hf.extension; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
