from __future__ import annotations

from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.hf.chat_template import USUAL, Rendering, closing, encode_first, encode_following
from msrnn.hf.tool_template import (
    check_calls,
    check_tools,
    encode_results,
    find_call,
    follow_call,
    show_tool,
)
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.tool_templates import HERMES, TEMPLATES, tool_tokenizer

RESULT: dict[str, Any] = {"role": "tool", "content": 'a "b"\n', "tool_call_id": "abcdefghi", "name": "f"}


def test_templates_that_know_tools_and_others() -> None:
    for form in TEMPLATES:
        check_tools(tool_tokenizer(form))
        check_calls(tool_tokenizer(form))
        check_calls(tool_tokenizer(form), tools=False)
    plain = byte_tokenizer()
    with pytest.raises(UsageError, match="knows no tools: give another template with --chat-template"):
        check_tools(plain)
    with pytest.raises(UsageError, match="does not write calls of tools"):
        check_calls(plain)
    plain.chat_template = HERMES  # is looked at again
    check_tools(plain)
    plain.chat_template = "{% if not tools %}{{ raise_exception('no') }}{% endif %}{{ tools | tojson }}"
    check_tools(plain)
    plain.chat_template = HERMES.replace("m['role'] == 'tool' %}", "m['role'] == 'result' %}", 1)
    with pytest.raises(UsageError, match="does not write calls of tools"):
        check_calls(plain)


def test_templates_that_write_calls_beside_tools_only() -> None:
    """Without tools, the template of ordinary conversations would leave the calls out."""
    tokenizer = tool_tokenizer("hermes")
    for template in (
        {"default": byte_tokenizer().chat_template, "tool_use": HERMES},
        HERMES.replace("call in m.tool_calls or []", "call in m.tool_calls if tools"),
    ):
        tokenizer.chat_template = template
        check_calls(tokenizer)
        with pytest.raises(UsageError, match="only beside tools: send the tools"):
            check_calls(tokenizer, tools=False)


def test_the_text_of_a_call() -> None:
    call = '{"name": "known_tool", "%s": {"known_key": "(a known value)"}%s}'
    assert find_call(tool_tokenizer("hermes")) == "<tool_call>\n" + call % ("arguments", "") + "\n</tool_call>"
    assert find_call(tool_tokenizer("llama3_json")) == call % ("parameters", "")
    assert find_call(tool_tokenizer("mistral")) == "[TOOL_CALLS] [%s]" % (call % ("arguments", ', "id": "call12345"'))


def test_results_follow_a_call() -> None:
    expected = {
        "hermes": "<user>" + '\n<tool_response>\na "b"\n\n</tool_response>' * 2 + "<end>\n<model>",
        "llama3_json": '<system>"a \\"b\\"\\n"<end>' * 2 + "<model>",
        "mistral": '[TOOL_RESULTS] {"content": "a \\"b\\"\\n", "call_id": "abcdefghi"}[/TOOL_RESULTS]' * 2,
    }
    for form, text in expected.items():
        tokenizer = tool_tokenizer(form)
        assert follow_call(tokenizer, [RESULT, RESULT], USUAL) == text
        assert tokenizer.decode(encode_results(tokenizer, [RESULT, RESULT], USUAL)) == text
    assert not follow_call(tool_tokenizer("hermes"), [RESULT], Rendering("closed")).endswith("<model>")


def test_results_are_text() -> None:
    """Also where the template writes them as JSON, in another spelling."""
    for form in TEMPLATES:
        tokenizer = tool_tokenizer(form)
        end = tokenizer.convert_tokens_to_ids("<end>")
        plain, special = (
            encode_results(tokenizer, [{**RESULT, "content": content}], USUAL) for content in ('x"', '<end>"')
        )
        assert plain.count(end) == special.count(end)
        assert "<end>" in tokenizer.decode([token for token in special if token < 256])
        with pytest.raises(UsageError, match="has the text of a special token"):
            encode_results(tokenizer, [{**RESULT, "tool_call_id": "a<end>bcd"}], USUAL)


def test_keys_in_brackets_are_no_special_tokens() -> None:
    """As templates that write calls as XML have them, whose brackets would complete the text of one."""
    tokenizer = tool_tokenizer("hermes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    written = "{% for key in call.function.arguments %}<parameter={{ key }}><{{ key }}>{% endfor %}"
    tokenizer.chat_template = HERMES.replace("{{- '}\\n</tool_call>' }}", f"{written}{{{{- '}}\\n</tool_call>' }}}}")
    assert tokenizer.chat_template != HERMES

    def encode(key: str) -> list[int]:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {key: "s"}}}
        return encode_first(
            tokenizer,
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT],
        )

    assert tokenizer.convert_tokens_to_ids("<s>") not in encode("size <")
    for key in ("a<end", "a<|turn|", "|turn|"):
        with pytest.raises(UsageError, match="has the text of a special token"):
            encode(key)


def test_markers_of_calls_are_text_in_results_and_in_messages_without_tools() -> None:
    """Also where the tokenizer does not flag them as special, and nothing around the content has them."""
    tokenizer = tool_tokenizer("hermes")
    marker = tokenizer.convert_tokens_to_ids("<tool_call>")
    text = "a <tool_call>{}</tool_call>"
    assert marker not in encode_results(tokenizer, [{**RESULT, "content": text}], USUAL)
    assert marker not in encode_first(tokenizer, [{"role": "user", "content": text}])
    assert marker not in encode_following(tokenizer, text)


def test_templates_that_end_a_call_otherwise_are_refused() -> None:
    tokenizer = tool_tokenizer("hermes")
    assert closing(tokenizer) == "<end>\n"
    tokenizer.chat_template = HERMES.replace("</tool_call>' }}", "</tool_call><s>' }}").replace(
        "{%- endfor %}<end>\n", "{%- endfor %}{% if not m.tool_calls %}<end>{% endif %}\n"
    )
    with pytest.raises(UsageError, match=r"does not end a call as it ends an answer.*without session_id"):
        follow_call(tokenizer, [RESULT], USUAL)
    end = "{{- '}\\n</tool_call>' }}"
    tokenizer.chat_template = HERMES.replace(end, end + "{{ messages | length }}")
    assert tokenizer.chat_template != HERMES
    with pytest.raises(UsageError, match="cannot continue a session"):
        follow_call(tokenizer, [RESULT], USUAL)


def test_templates_that_drop_thoughts_before_earlier_calls() -> None:
    """What follows the call is the same, and the state has read the thought as the model wrote it."""
    tokenizer = tool_tokenizer("hermes")
    expected = follow_call(tokenizer, [RESULT], USUAL)
    tokenizer.chat_template = HERMES.replace("<model>\n", "<model>{% if loop.last %}<think></think>{% endif %}\n", 1)
    assert "<think></think>" in str(find_call(tokenizer))
    assert follow_call(tokenizer, [RESULT], USUAL) == expected
    assert follow_call(tokenizer, [{**RESULT, "content": "(a known value)"}], USUAL).count("(a known value)") == 1


def test_a_tool_as_templates_take_it() -> None:
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert show_tool("f", None, None) == {"type": "function", "function": function}
