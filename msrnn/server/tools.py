"""The tools of a request: what the template shows of them, how calls are found, and what a required call may be."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from msrnn.engine.constraint import Constraint
from msrnn.engine.session_files import Session
from msrnn.errors import UsageError
from msrnn.hf.chat_template import check_template
from msrnn.hf.tool_template import check_tools, show_tool
from msrnn.server.beginnings import Beginning
from msrnn.server.call_formats import FORMATS, CallFormat
from msrnn.server.call_grammar import make_call_grammar
from msrnn.server.call_parser import CallParser
from msrnn.server.errors import ApiError, bad_value
from msrnn.server.structured import refuse_constraint
from msrnn.server.tool_models import Function, NamedTool, ShownTools, ToolFields

Constrained = tuple[str, Constraint] | None  # the field that constrains an answer, and how


class CallSearch(NamedTuple):
    """How calls are found in answers."""

    form: CallFormat
    names: frozenset[str]
    most: int | None
    shown_tokens: list[int]  # markers that are special tokens, or may be

    def make_parser(self) -> CallParser:
        return CallParser(self.form, self.names, self.most)


class RequestTools(NamedTuple):
    """The tools of a request.

    shown       as the template takes them
    search      how calls are found; None: the answer is text
    constraint  what the answer may be because of its tools
    """

    shown: list[dict[str, Any]]
    search: CallSearch | None = None
    constraint: Constrained = None

    @property
    def variables(self) -> dict[str, Any]:
        """Of the chat template."""
        return {"tools": self.shown} if self.shown else {}

    @property
    def digest(self) -> str:
        """A name for these tools, whatever the order of the keys in their schemas; of none, the empty one."""
        text = json.dumps(self.shown, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32] if self.shown else ""


def read_tools(
    request: ToolFields, tokenizer: Any, form: CallFormat | None, session: Session | None, other: Constrained
) -> RequestTools:
    """The tools of a request, checked.

    form     in which the model writes calls; None: not known
    session  the one that the request continues, which has read its tools
    other    what the answer may be because of another field
    """
    functions, tools = [tool.function for tool in request.tools], show_tools(request, tokenizer)
    if not functions:
        if request.tool_choice not in ("none", "auto"):
            raise bad_value("tool_choice", f"tool_choice={_describe(request.tool_choice)}: needs tools")
        return tools
    if session is not None and Beginning.parse(session.beginning).tools != tools.digest:
        raise bad_value("tools", "tools: the session began with other tools, or with none; send the same ones")
    if request.tool_choice == "none":
        return tools
    if form is None:
        raise bad_value(
            "tools",
            "tools: the chat template does not show in which format this model calls tools; start the server with "
            f"--tool-call-parser ({', '.join(FORMATS)})",
        )
    if other is not None:
        raise bad_value(other[0], f"{other[0]} and tools both say what the answer may be: give tool_choice none")
    markers = form.find_tokens(tokenizer)
    most = None if request.parallel_tool_calls else 1
    search = CallSearch(form, frozenset(one.name for one in functions), most, [*markers.values()])
    texts = form.list_text_tokens(tokenizer)
    return tools._replace(search=search, constraint=_constrain(request, functions, form, markers, texts))


def show_tools(request: ShownTools, tokenizer: Any) -> RequestTools:
    """The tools of a request as the template takes them, and nothing about calls."""
    functions = [tool.function for tool in request.tools]
    if functions:
        _check_functions(functions, tokenizer)
    return RequestTools([show_tool(one.name, one.description, one.parameters) for one in functions])


def _check_functions(functions: list[Function], tokenizer: Any) -> None:
    names = [one.name for one in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise bad_value("tools", f"tools: {twice!r} is the name of two functions: give each its own")
    try:
        check_template(tokenizer)
        check_tools(tokenizer)
    except UsageError as error:
        raise bad_value("tools", f"tools: {error}") from error


def _constrain(
    request: ToolFields, functions: list[Function], form: CallFormat, markers: dict[str, int], texts: list[int]
) -> Constrained:
    """A call that must be made is as its schema says, and so is every call if a function is strict."""
    choice, field = request.tool_choice, "tools"
    if isinstance(choice, NamedTool):
        functions = [one for one in functions if one.name == choice.function.name]
        if not functions:
            raise bad_value("tool_choice", f"tool_choice={_describe(choice)}: is not the name of one of the tools")
    elif choice == "auto" and not any(one.strict for one in functions):
        return None
    required = choice != "auto"
    schemas = {one.name: one.parameters if required or one.strict else {} for one in functions}
    try:
        several = request.parallel_tool_calls and not isinstance(choice, NamedTool)
        return field, make_call_grammar(form, markers, schemas, several, not required, texts)
    except UsageError as error:
        raise refuse_constraint(error, field) from error


def _describe(choice: Any) -> str:
    return choice.function.name if isinstance(choice, NamedTool) else str(choice)


def refuse_continuing() -> ApiError:
    """A message that is continued may end within a call, of which the answer then has a part."""
    return bad_value(
        "tools",
        "tools: an answer that continues the last message has no calls; give tool_choice none, or "
        "add_generation_prompt true for a new answer",
    )
