"""Bad requests: each is a clean 4xx that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import post


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[1]", 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"prompt": "a", "temperature": NaN}', 400, None),
        ({"prompt": "a", "tools": []}, 400, "tools"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [10**9]}, 400, None),
        ({}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**6}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "top_p": 2}, 400, "top_p"),
        ({"prompt": "a", "n": 100}, 400, None),
        ({"prompt": "a", "logprobs": True}, 400, "logprobs"),
        ({"prompt": "a", "logprobs": 99}, 400, "logprobs"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": "a", "stop": 5}, 400, "stop"),
        ({"prompt": "a", "stop_token_ids": 5}, 400, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": [-5]}, 400, None),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "logit_bias": [1]}, 400, "logit_bias"),
        ({"prompt": "a", "stream": "yes"}, 400, "stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"prompt": "a", "ignore_eos": 1}, 400, "ignore_eos"),
        ({"prompt": "a", "session_id": "../x"}, 400, "session_id"),
        ({"prompt": ["a", "b"], "session_id": "x"}, 400, "prompt"),
        ({"prompt": ["a"] * 500}, 400, "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"prompt": "a", "\ud800": 1}, 400, "\\ud800"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
        ({"prompt": "a", "user": 7}, 400, "user"),
    ],
)
def test_bad_completions(address: str, body: Any, status: int, param: str | None) -> None:
    found = post(address, body)
    assert found.status_code == status
    error = found.json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "prompt"),
    ],
)
def test_bad_chats(address: str, body: Any, param: str) -> None:
    found = post(address, body, "/v1/chat/completions")
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param
