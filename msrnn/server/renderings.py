"""How a request wants its messages rendered by the chat template."""

from __future__ import annotations

from typing import Any

from msrnn.errors import UsageError
from msrnn.hf.chat_template import Rendering, changes_beginning, check_template, check_variables
from msrnn.server.errors import bad_value
from msrnn.server.request_models import TemplateFields

EFFORT, VARIABLES = "reasoning_effort", "chat_template_kwargs"


def read_rendering(
    request: TemplateFields, tokenizer: Any, last_role: str, begins: bool, allow_special: bool
) -> Rendering:
    """Where the rendered text ends, and the variables of the template.

    last_role  that of the last message
    begins     whether the messages begin a conversation; otherwise a session has read what was before them
    """
    return Rendering(_choose_end(request, last_role), _read_variables(request, tokenizer, begins, allow_special))


def _choose_end(request: TemplateFields, last_role: str) -> Any:
    """Models are not trained on two answers in a row, so a last message of the assistant is continued by default."""
    starts, continues = request.add_generation_prompt, request.continue_final_message
    if starts and continues:
        raise bad_value(
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true: the last message goes on, or a new one "
            "begins; give one of them",
        )
    if continues and last_role != "assistant":
        raise bad_value(
            "continue_final_message",
            f"continue_final_message: the last message has the role {last_role!r}, and only one of the assistant can "
            "be continued; leave it out",
        )
    if continues or (continues is None and starts is None and last_role == "assistant"):
        return "open"
    return "closed" if starts is False else "answer"


def _read_variables(request: TemplateFields, tokenizer: Any, begins: bool, allow_special: bool) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        if EFFORT in variables:
            raise bad_value(EFFORT, f"{EFFORT} is given twice, also in {VARIABLES}: give one of them")
        variables[EFFORT] = request.reasoning_effort
    if not variables:
        return {}
    for name, value in variables.items():
        field = EFFORT if name == EFFORT and request.reasoning_effort is not None else VARIABLES
        try:
            check_template(tokenizer)
            check_variables(tokenizer, {name: value}, allow_special)
            if not begins and changes_beginning(tokenizer, {name: value}):
                raise _late_error(name)
        except UsageError as error:
            raise bad_value(field, f"{field}: {error}") from error
    return variables


def _late_error(name: str) -> UsageError:
    return UsageError(
        f"variable {name!r} changes the beginning of a conversation, which this session has read already; leave it "
        "out, or begin another session"
    )
