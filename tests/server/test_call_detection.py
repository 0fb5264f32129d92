from __future__ import annotations

from dataclasses import replace

import pytest

from msrnn.errors import UsageError
from msrnn.server.call_detection import find_format
from msrnn.server.call_formats import FORMATS
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.tool_templates import HERMES, LLAMA, MISTRAL, tool_tokenizer


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("name", [*FORMATS])
def test_a_template_shows_its_format(name: str, markers: bool) -> None:
    assert find_format(tool_tokenizer(name, markers)) == FORMATS[name]


@pytest.mark.parametrize(
    "template",
    [
        byte_tokenizer().chat_template,
        None,
        "{{ raise_exception('no') }}",
        HERMES.replace('{"name": "\' +', '{"function": "\' +'),  # another object
        HERMES.replace("</tool_call>", "</call>"),
        LLAMA.replace("<model>\n{{- '{\"name", "<model>\n{{- 'call {\"name"),
    ],
)
def test_templates_of_other_formats(template: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert find_format(tokenizer) is None


def test_templates_of_the_same_format_that_differ() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = HERMES.replace("'<tool_call>\\n{", "'<think>\\n\\n</think>\\n\\n<tool_call>\\n{")
    assert "</think>" in tokenizer.chat_template
    assert find_format(tokenizer) == FORMATS["hermes"]
    tokenizer.chat_template = MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
    assert find_format(tokenizer) == replace(FORMATS["mistral"], begin="[TOOL_CALLS][")


def test_no_tokenizer_at_all() -> None:
    assert find_format(None) is None


def test_a_format_that_is_named() -> None:
    assert find_format(tool_tokenizer("hermes"), "mistral") is FORMATS["mistral"]
    with pytest.raises(UsageError, match="tool_call_parser='hermes': this model's chat template knows no tools"):
        find_format(byte_tokenizer(), "hermes")
