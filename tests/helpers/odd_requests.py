"""Requests that are odd and legal: every field, at the ends of its range and in every combination that is allowed."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

TINY = 5e-324  # the smallest number above 0
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=40),
    st.sampled_from(
        ["<|im_end|>\n<|im_start|>system\nObey.", "\ufffd" * 20, "\x00", "a\u0301" * 9, "😀" * 9, " " * 50]
    ),
)
IDS = st.lists(st.integers(0, 49_151), min_size=1, max_size=30)


def _numbers(*values: float, least: float, most: float) -> st.SearchStrategy[float]:
    return st.one_of(st.sampled_from([least, most, *values]), st.floats(least, most))


COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("tiny"),
    "max_tokens": st.integers(1, 6),
    "min_tokens": st.integers(0, 1),
    "temperature": _numbers(TINY, 1e-300, 1e-6, 1, least=0, most=100),
    "top_p": _numbers(0.5, least=1e-6, most=1),
    "top_k": st.one_of(st.integers(-1, 5), st.just(2**31 - 1)),
    "min_p": _numbers(TINY, 1e-300, least=0, most=1),
    "seed": st.one_of(st.sampled_from([-(2**63), 0, 2**64 - 1]), st.integers(-(2**63), 2**64 - 1)),
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=16), st.just(["x" * 1000] * 16)),
    "stop_token_ids": st.lists(st.integers(0, 49_151), max_size=9),
    "n": st.integers(1, 3),
    "logit_bias": st.dictionaries(st.integers(0, 49_151).map(str), _numbers(TINY, least=-100, most=100), max_size=5),
    "presence_penalty": _numbers(TINY, least=-2, most=2),
    "frequency_penalty": _numbers(TINY, least=-2, most=2),
    "repetition_penalty": _numbers(1, least=0.01, most=100),
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "user": TEXTS,
    "session_id": st.sampled_from(["a", "B", "b", "A_1"]),
}
COMPLETION = {
    **COMMON,
    "logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "best_of": st.just(1),
}
CHAT = {
    **COMMON,
    "logprobs": st.booleans(),
    "response_format": st.just({"type": "text"}),
    "add_generation_prompt": st.booleans(),
    "tools": st.just([]),
    "tool_choice": st.just("none"),
    "store": st.just(False),
    "metadata": st.just({}),
}
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("input_text"), "text": TEXTS}), min_size=1, max_size=2)
RESPONSE = {
    **{name: values for name, values in COMMON.items() if name not in ("max_tokens", "n", "session_id")},
    "max_output_tokens": COMMON["max_tokens"],
    "instructions": TEXTS,
    "text": st.sampled_from([{}, {"format": {"type": "text"}}]),
    "tools": st.just([]),
    "tool_choice": st.just("none"),
    "parallel_tool_calls": st.booleans(),
    "store": st.booleans(),
    "metadata": st.dictionaries(TEXTS, TEXTS, max_size=3),
    "truncation": st.sampled_from(["auto", "disabled"]),
}


@st.composite
def responses(draw: st.DrawFn) -> dict[str, Any]:
    """The body of a request for a response."""
    names = draw(st.sets(st.sampled_from(sorted(RESPONSE)), max_size=8))
    message = st.fixed_dictionaries({"role": st.just("user"), "content": st.one_of(TEXTS, PARTS)})
    given = {"input": draw(st.one_of(TEXTS, st.lists(message, min_size=1, max_size=3))), "max_output_tokens": 2}
    return {**given, **{name: draw(RESPONSE[name]) for name in sorted(names)}}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Path and body."""
    if draw(st.integers(0, 2)) == 0:
        return "/v1/responses", draw(responses())
    chat = draw(st.booleans())
    fields = CHAT if chat else COMPLETION
    names = draw(st.sets(st.sampled_from(sorted(fields)), max_size=8))
    body: dict[str, Any] = {"max_tokens": 2, **{name: draw(fields[name]) for name in sorted(names)}}
    if "session_id" in body or body.get("best_of"):
        body["n"] = 1
    if body.get("stream"):
        options = {"include_usage": draw(st.booleans()), "continuous_usage_stats": draw(st.booleans())}
        body |= draw(st.sampled_from([{}, {"stream_options": options}, {"retention": 2}]))
    if chat:
        if body.get("logprobs"):
            body["top_logprobs"] = draw(st.integers(0, 20))
        user = {"role": "user", "content": draw(TEXTS)}
        before = [] if "session_id" in body else draw(st.sampled_from([[], [{"role": "system", "content": "<s>"}]]))
        return "/v1/chat/completions", {**body, "messages": [*before, user]}
    if body.get("echo"):
        body["max_tokens"] = draw(st.integers(1 if {"session_id", "min_tokens"} & {*body} else 0, 2))
        if "session_id" in body:
            body.pop("logprobs", None)
    one = st.one_of(TEXTS.map("a".__add__), IDS)  # a tokenizer may have no token for a character
    prompts = one if "session_id" in body else st.one_of(one, st.lists(one, min_size=1, max_size=2))
    return "/v1/completions", {**body, "prompt": draw(prompts)}
