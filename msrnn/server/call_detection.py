"""Which format of calls a model writes, as its chat template shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from msrnn.errors import UsageError
from msrnn.hf.known_call import ARGUMENTS, TOOL
from msrnn.hf.model_options import AUTO
from msrnn.hf.tool_template import check_tools, find_call
from msrnn.server.call_formats import FORMATS, CallFormat
from msrnn.server.call_parser import read_calls


def find_format(tokenizer: Any, name: str = AUTO) -> CallFormat | None:
    """The format of this name, or for "auto" that of the chat template; None where the template shows none of them.

    A template shows its format by writing a call that is known: one format alone must read back this call, and nothing
    else. Raises a UsageError if a format is named, and the template knows no tools.
    """
    if name != AUTO:
        try:
            check_tools(tokenizer)
        except UsageError as error:
            raise UsageError(error.problem, name="tool_call_parser", value=name) from error
        return FORMATS[name]
    text = find_call(tokenizer) if getattr(tokenizer, "chat_template", None) else None
    found = [] if text is None else [one for one in FORMATS.values() if _reads(one, text)]
    if text is None or len(found) != 1:
        return None
    (form,) = found
    begin = text[text.find(form.opening) : text.index("{")] if form.opening in text else form.begin
    return replace(form, begin=begin)  # with the white space of the template


def _reads(form: CallFormat, text: str) -> bool:
    """Whether this format finds the known call in a text, and nothing else but an empty thought."""
    content, calls = read_calls(text, form, {TOOL})
    rest = content.replace("<think>", "", 1).replace("</think>", "", 1)
    return not rest.strip() and [json.loads(call.arguments) for call in calls] == [ARGUMENTS]
