"""The bodies of requests: types, bounds and meanings of their fields. The OpenAPI document is made from these classes.

Types are strict: a number is not taken from a string, nor from true. Null counts as not given.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
)

from msrnn.checks import is_deeper
from msrnn.engine.constraint import MOST_CHOICES
from msrnn.engine.requests import (
    COUNTS,
    LEAST_BIAS,
    LONGEST_STOP,
    MOST_BIAS,
    MOST_STOPS,
    MOST_TOKEN_IDS,
    NUMBERS,
)
from msrnn.engine.session_id import NAME_PATTERN
from msrnn.server.message_models import MOST_MESSAGES, Messages
from msrnn.server.request_body import Body, Text, WholeText, check_whole, must
from msrnn.server.structured_models import Choices, ResponseFormat, StructuredOutputs
from msrnn.server.tool_models import ToolFields
from msrnn.server.usual_fields import MOST_NAME

MOST_VARIABLES, DEEPEST = 10_000, 16  # characters of variables of the chat template, as JSON, and how deep it nests
NAME_WORDS = "1 to 64 letters, digits, hyphens and underscores"


def within(name: str, least: int | None = None, **more: Any) -> Any:
    """A field with the bounds that sampling has for it."""
    low, high = COUNTS[name] if name in COUNTS else NUMBERS[name]
    return Field(ge=low if least is None else least, le=high, **more)


def _few(value: Any) -> Any:
    """Refuse many entries before each of them is looked at."""
    if isinstance(value, list | dict) and len(value) > MOST_TOKEN_IDS:
        raise ValueError(f"{len(value):,} entries")
    return value


class StreamOptions(Body):
    include_usage: bool = Field(default=False, description="end with a chunk that has the numbers of tokens")
    continuous_usage_stats: bool = Field(default=False, description="with `include_usage`: the numbers in every chunk")


TokenIds = Annotated[list[int], Field(fail_fast=True)]
StopText = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]
TokenId = Annotated[str, Field(pattern=r"^\d{1,9}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Bias = Annotated[float, Field(ge=LEAST_BIAS, le=MOST_BIAS)]


class SamplingFields(Body):
    """The fields that all requests for an answer share."""

    model: Text = Field("", description="the name of the model; by default the one that is served")
    min_tokens: Annotated[int, within("min_tokens")] = Field(
        0, description="tokens of the answer, at least: before, no stop token and no stop string ends it"
    )
    temperature: Annotated[float, within("temperature")] = Field(1.0, description="0: the most likely token, always")
    top_p: Annotated[float, within("top_p")] = Field(
        1.0, description="sample among the most likely tokens that have this probability together"
    )
    top_k: Annotated[int, within("top_k", least=-1)] = Field(
        0, description="sample among this many tokens; 0 or -1: among all"
    )
    min_p: Annotated[float, within("min_p")] = Field(
        0.0, description="sample among tokens at least this likely, relative to the most likely one"
    )
    seed: Annotated[int, within("seed")] | None = Field(
        None, description="two answers with one seed are the same, up to rounding; by default each has another"
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS, fail_fast=True)] = Field(
        [],
        description="the answer ends before any of these strings",
        json_schema_extra=must(
            f"a string or a list of at most {MOST_STOPS} strings, each of 1 to {LONGEST_STOP:,} characters"
        ),
    )
    stop_token_ids: Annotated[TokenIds, Field(max_length=MOST_TOKEN_IDS), BeforeValidator(_few)] = Field(
        [],
        description="the answer ends before any of these tokens",
        json_schema_extra=must(f"a list of at most {MOST_TOKEN_IDS:,} token ids"),
    )
    ignore_eos: bool = Field(False, description="go on after the model's own stop tokens")
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MOST_TOKEN_IDS), BeforeValidator(_few)] = Field(
        {},
        description="is added to the logits of these token ids",
        json_schema_extra=must(
            f"an object from token ids to numbers from {LEAST_BIAS} to {MOST_BIAS}, with {MOST_TOKEN_IDS:,} at most"
        ),
    )
    presence_penalty: Annotated[float, within("presence_penalty")] = Field(
        0.0, description="is subtracted from the logits of tokens of the answer"
    )
    frequency_penalty: Annotated[float, within("frequency_penalty")] = Field(
        0.0, description="the same, once for each time that the token was generated"
    )
    repetition_penalty: Annotated[float, within("repetition_penalty")] = Field(
        1.0, description="divides the logits of tokens of the prompt and the answer, or multiplies negative ones"
    )
    stream: bool = Field(False, description="send the answer as server-sent events while it is generated")
    user: Annotated[Text, Field(max_length=MOST_NAME)] = Field("", description="is not used")
    protect: Literal["none", "system", "prompt"] = Field(
        "none",
        description="tokens that are not evicted: the system message, or the prompt until the session's next turn",
    )
    size: Annotated[int, Field(ge=1)] | None = Field(
        None, description="KV rows per layer, fewer than the server's; a session keeps that of its first request"
    )


class GenerationRequest(SamplingFields):
    """The fields that chats and completions share."""

    max_tokens: Annotated[int, within("max_tokens")] | None = Field(None, description="tokens of the answer, at most")
    n: Annotated[int, within("n")] = Field(1, description="answers to each prompt")
    stream_options: Annotated[StreamOptions, BeforeValidator(_few)] | None = Field(
        None,
        description="needs `stream`",
        json_schema_extra=must("an object, and may have include_usage and continuous_usage_stats only"),
    )
    session_id: Annotated[str, Field(pattern=NAME_PATTERN)] | None = Field(
        None,
        description="the conversation that the request continues or begins",
        json_schema_extra=must(NAME_WORDS),
    )
    session_turns: Annotated[int, Field(ge=0)] | None = Field(
        None, description="needs `session_id`: finished turns that the session must have, or else error 409"
    )
    response_format: ResponseFormat | None = Field(
        None,
        description="the answer is any text, a JSON object, or JSON that a schema allows",
        json_schema_extra=must(
            'an object: {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": '
            '{"name": …, "schema": …}}'
        ),
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="what the answer may be, in vLLM's form",
        json_schema_extra=must("an object with one of the fields json, json_object, regex, choice and grammar"),
    )
    guided_json: dict[str, Any] | Text | bool | None = Field(
        None, description="the answer is JSON that this schema allows", json_schema_extra=must("a JSON schema")
    )
    guided_regex: Text | None = Field(None, description="the whole answer matches this regular expression")
    guided_choice: Choices | None = Field(
        None,
        description="the answer is one of these texts",
        json_schema_extra=must(f"a list of 1 to {MOST_CHOICES:,} texts"),
    )
    guided_grammar: Text | None = Field(None, description="this grammar, in Lark's notation, allows the answer")
    retention: Annotated[int, Field(ge=0)] = Field(
        0, description="needs `stream`: tell which tokens the state holds, each time after this many tokens; 0: never"
    )


def _is_small(variables: dict[str, Any]) -> dict[str, Any]:
    """Refuse a value that is deeper or longer than templates need, before it is looked at as a whole."""
    if is_deeper(variables, DEEPEST) or len(text := json.dumps(variables, ensure_ascii=False)) > MOST_VARIABLES:
        raise ValueError(f"deeper than {DEEPEST} or longer than {MOST_VARIABLES} characters")
    check_whole(text)
    return variables


class TemplateVariables(Body):
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_is_small)] = Field(
        {},
        description="variables of the model's chat template, as `enable_thinking`",
        json_schema_extra=must(f"an object of at most {MOST_VARIABLES:,} characters, {DEEPEST} levels deep"),
    )


class TemplateFields(TemplateVariables):
    """How the chat template renders messages."""

    add_generation_prompt: bool | None = Field(
        None,
        description="begin a new answer after the messages; by default true, unless the last message is continued",
    )
    continue_final_message: bool | None = Field(
        None,
        description="continue the last message, which must be the assistant's; by default true if it is, unless "
        "`add_generation_prompt` is given",
    )
    reasoning_effort: Effort | None = Field(None, description="the variable of this name of the chat template")


class ChatRequest(GenerationRequest, TemplateFields, ToolFields):
    messages: Messages = Field(
        description="the conversation; of a session that has begun, one message of the user, or results of calls",
        json_schema_extra=must(f"a list of 1 to {MOST_MESSAGES:,} messages"),
    )
    max_tokens: Annotated[int, within("max_tokens", least=1)] | None = Field(
        None, description="tokens of the answer, at most"
    )
    max_completion_tokens: Annotated[int, within("max_tokens", least=1)] | None = Field(
        None, description="another name of `max_tokens`; give one of them"
    )
    logprobs: bool = Field(False, description="return the log probability of each token of the answer")
    top_logprobs: Annotated[int, within("logprobs")] | None = Field(
        None, description="needs `logprobs`: also return this many of the most likely tokens at every step"
    )


Prompt = WholeText | Annotated[TokenIds, Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, fail_fast=True)] = Field(
        description="the text that the model continues; a list of prompts has one answer or more for each",
        json_schema_extra=must("a text, a list of token ids, or a list of either, and not empty"),
    )
    suffix: WholeText = Field(
        "",
        description="the text after the answer, where the tokenizer has infill tokens; needs a prompt of text",
    )
    echo: bool = Field(False, description="send the prompt back before the answer")
    logprobs: Annotated[int, within("logprobs")] | None = Field(
        None, description="return this many of the most likely tokens at every step; with `echo`, of the prompt, too"
    )

    @property
    def prompts(self) -> list[Any]:
        """Each prompt, as text or token ids."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else [*self.prompt]


class ForkRequest(Body):
    to: Text = Field(
        description="the name of the new session", json_schema_extra={"pattern": NAME_PATTERN, **must(NAME_WORDS)}
    )
