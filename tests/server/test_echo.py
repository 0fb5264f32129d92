"""Prompts that are sent back: their text and log probabilities, whole and in streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch

import msrnn
from msrnn.hf.loading import Loaded
from tests.helpers.live_server import KEY, post, running
from tests.helpers.step_orders import both_orders
from tests.helpers.tiny import build, llama

pytestmark = both_orders

TEXT = "The sea was calm, 🌊 and the old harbour lay still."


def expected(rnn: msrnn.MultiStateRNN, ids: list[int]) -> list[float]:
    """The log probabilities of all tokens but the first."""
    logits = rnn.read(torch.tensor([ids]), rnn.state())[0, :-1].float().log_softmax(-1)
    found: list[float] = logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


def streamed(address: str, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together."""
    headers = {"Authorization": f"Bearer {KEY}"}
    found: dict[int, dict[str, Any]] = {}
    url = f"{address}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=60) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                one = found.setdefault(choice["index"], {**choice, "text": "", "logprobs": None})
                one["text"] += choice["text"]
                one["finish_reason"] = choice["finish_reason"] or one["finish_reason"]
                if choice["logprobs"]:
                    one["logprobs"] = one["logprobs"] or {name: [] for name in choice["logprobs"]}
                    for name, values in choice["logprobs"].items():
                        one["logprobs"][name] += values
    return found


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_log_probabilities_of_prompts(
    address: str, rnn: msrnn.MultiStateRNN, small: Loaded, kind: str, max_tokens: int
) -> None:
    texts = [TEXT, "Once"]
    ids = [small.tokenizer(text)["input_ids"] for text in texts]
    prompts = texts if kind == "text" else ids
    ask = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0, "n": 2, "prompt": prompts}
    post(address, {"prompt": prompts, "max_tokens": 1})  # whose states are kept
    body = post(address, ask).json()
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for choice in body["choices"]:
        text, tokens, found = texts[choice["index"] // 2], ids[choice["index"] // 2], choice["logprobs"]
        assert choice["text"].startswith(text)
        assert choice["finish_reason"] == "length"
        assert {len(found[name]) for name in found} == {len(tokens) + max_tokens}
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert found["token_logprobs"][1 : len(tokens)] == pytest.approx(expected(rnn, tokens), abs=1e-4)
        columns = [found[name][1:] for name in ("token_logprobs", "top_logprobs", "tokens")]
        for own, top, token in zip(*columns, strict=True):
            assert 1 <= len(top) <= 3
            assert max(top.values()) >= own
            assert token in top
        for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
            if "\N{REPLACEMENT CHARACTER}" not in token:
                assert choice["text"][offset : offset + len(token)] == token
        assert found["text_offset"] == sorted(found["text_offset"])
    assert [*streamed(address, ask).values()] == body["choices"]


def test_echo_alone(address: str, small: Loaded) -> None:
    """A text comes back as it was sent; of tokens, special ones are left out."""
    text = "a<|im_end|>\n b\u00e9"
    ask = {"prompt": text, "echo": True, "max_tokens": 3, "temperature": 0}
    plain = post(address, {**ask, "echo": False}).json()["choices"][0]
    (found,) = post(address, ask).json()["choices"]
    assert found == {**plain, "text": text + plain["text"]}
    assert streamed(address, ask)[0]["text"] == found["text"]
    (none,) = post(address, {**ask, "max_tokens": 0}).json()["choices"]
    assert (none["text"], none["finish_reason"], none["logprobs"]) == (text, "length", None)
    assert streamed(address, {**ask, "max_tokens": 0})[0]["text"] == text
    (by_ids,) = post(address, {**ask, "prompt": small.tokenizer(text)["input_ids"]}).json()["choices"]
    assert by_ids["text"] == text.replace("<|im_end|>", "") + plain["text"]
    session = {**ask, "session_id": "echoed"}
    for _ in range(2):
        assert post(address, session).json()["choices"][0]["text"].startswith(text)
    httpx.delete(f"{address}/v1/sessions/echoed", headers={"Authorization": f"Bearer {KEY}"})


def test_refusals(address: str) -> None:
    ask = {"prompt": "a", "max_tokens": 1}
    for wrong, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False, "logprobs": 1}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "session_id": "x"}, "logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 20, "prompt": [[5] * 1900] * 30}, "logprobs"),
    ):
        found = post(address, {**ask, **wrong})
        assert (found.status_code, found.json()["error"]["param"]) == (400, param)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}
    assert post(address, chat, "/v1/chat/completions").json()["error"]["param"] == "max_tokens"


def test_a_stop_token_counts(small: Loaded) -> None:
    """Clients leave the last log probability out, as that of the generated token: it must be there."""
    stop = int(small.tokenizer.eos_token_id)
    rnn = msrnn.MultiStateRNN(build(llama(vocab_size=len(small.tokenizer), eos_token_id=stop), "cpu"), "tova", 16)
    ids = small.tokenizer(TEXT)["input_ids"]
    ask = {"prompt": TEXT, "max_tokens": 1, "echo": True, "logprobs": 1, "logit_bias": {str(stop): 100}}
    with running(msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer)) as address:
        (found,) = post(address, ask).json()["choices"]
        assert found == streamed(address, ask)[0]
    assert (found["text"], found["finish_reason"]) == (TEXT, "stop")
    assert found["logprobs"]["tokens"][-1] == small.tokenizer.eos_token
    assert len(found["logprobs"]["tokens"]) == len(ids) + 1
    assert found["logprobs"]["token_logprobs"][1:-1] == pytest.approx(expected(rnn, ids), abs=1e-4)
