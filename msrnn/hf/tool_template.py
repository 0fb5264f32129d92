"""Tools in chat templates: whether a template knows them, how it writes a call, and how the results continue a session.

Templates differ, so each question is answered by rendering a conversation that is known.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from msrnn.errors import UsageError
from msrnn.hf.chat_template import Rendering, closing, list_tool_texts, render
from msrnn.hf.known_call import ANSWERED, ARGUMENTS, ASKED, CALLED, RESULT, TOOL, TOOLS
from msrnn.hf.messages import Messages, encode_messages

_OTHER = "give another template with --chat-template, or use a model that was trained to call tools"


def check_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose chat template does not write the tools that it is given."""
    if not _writes_tools(tokenizer, str(tokenizer.chat_template)):
        raise UsageError(f"this model's chat template knows no tools: {_OTHER}")


def check_calls(tokenizer: PreTrainedTokenizerBase, tools: bool = True) -> None:
    """Refuse a tokenizer whose chat template does not write earlier calls, or their results.

    Without `tools`, some templates leave them out, and some tokenizers take a template for ordinary conversations.
    """
    template = str(tokenizer.chat_template)
    if _writes_calls(tokenizer, template, tools):
        return
    if not tools and _writes_calls(tokenizer, template, True):
        raise UsageError(
            "this model's chat template writes calls of tools and their results only beside tools: send the tools, too"
        )
    raise UsageError(f"this model's chat template does not write calls of tools and their results: {_OTHER}")


@lru_cache(maxsize=8)
def _writes_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    try:
        text = render(tokenizer, ASKED, True, {"tools": TOOLS})
    except UsageError:
        return False
    try:
        return text != render(tokenizer, ASKED, True)
    except UsageError:  # some render nothing without tools
        return TOOL in text


@lru_cache(maxsize=8)
def _writes_calls(tokenizer: PreTrainedTokenizerBase, template: str, tools: bool) -> bool:
    try:
        text = render(tokenizer, ANSWERED, True, {"tools": TOOLS} if tools else {})
    except UsageError:
        return False
    return all(part in text for part in (TOOL, *ARGUMENTS, *ARGUMENTS.values(), RESULT))


def find_call(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text of an answer that calls `TOOL` with `ARGUMENTS`, as the template writes it; None if that is not certain.

    It is what stands between the beginning of an answer and the text after every answer.
    """
    try:
        variables = {"tools": TOOLS}
        before, end = render(tokenizer, ASKED, True, variables), closing(tokenizer, Rendering(variables=variables))
        text = render(tokenizer, CALLED, False, variables)
    except UsageError:
        return None
    if not text.startswith(before) or not end or not text.endswith(end) or len(text) < len(before) + len(end):
        return None
    return text[len(before) : len(text) - len(end)]


def follow_call(tokenizer: PreTrainedTokenizerBase, results: Messages, rendering: Rendering) -> str:
    """The results of a call, up to where the answer begins: what they add after the `closing` of the turn before.

    Raises a UsageError if the template ends a call otherwise than an answer, or otherwise when results follow: what the
    state has read could then not be continued.
    """
    before = render(tokenizer, CALLED, False, rendering.variables)
    after = render(tokenizer, [*CALLED, *results], rendering.end == "answer", rendering.variables)
    (argument,) = ARGUMENTS.values()
    end, rest = before.partition(argument)[2], after.partition(argument)[2]
    ends_alike = before.count(argument) == 1 and end.endswith(closing(tokenizer, rendering))
    if not ends_alike or not rest.startswith(end):
        raise UsageError(
            "this model's chat template does not end a call as it ends an answer, so results cannot continue a "
            "session: send the whole conversation instead, without session_id"
        )
    return rest[len(end) :]


def encode_results(tokenizer: PreTrainedTokenizerBase, results: Messages, rendering: Rendering) -> list[int]:
    """The tokens of `follow_call`. Results are text, without special tokens."""
    others = list_tool_texts(results, rendering.variables)
    return encode_messages(tokenizer, results, lambda some: follow_call(tokenizer, some, rendering), others)


def show_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A function as chat templates take it."""
    function: dict[str, Any] = {"name": name, "description": description or ""}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
