"""The server with the real `openai` client, over real sockets; a tiny model answers, with a real tokenizer."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import msrnn
from msrnn.engine.scheduler import Counts
from msrnn.hf.loading import Loaded
from msrnn.server.limits import Limits
from tests.helpers.live_server import KEY, greedy, post, running, slow_down, wait_until
from tests.helpers.serving import metrics
from tests.helpers.step_orders import both_orders
from tests.helpers.tiny import build, llama

pytestmark = both_orders


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


def test_completions(client: openai.OpenAI, rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    prompts = ["The sea was calm", "Once upon a time there", "Two and two"]
    ids = [small.tokenizer(prompt)["input_ids"] for prompt in prompts]
    expected = [small.tokenizer.decode(greedy(rnn, each, 9)) for each in ids]
    found = client.completions.create(model="tiny", prompt=prompts, max_tokens=9, temperature=0)
    assert [choice.text for choice in found.choices] == expected
    assert [choice.finish_reason for choice in found.choices] == ["length"] * 3
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (sum(map(len, ids)), 27)
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=9, temperature=0, echo=True)
    assert [choice.text for choice in by_ids.choices] == [p + e for p, e in zip(prompts, expected, strict=True)]


def test_a_stream_is_the_whole(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "seed": 5, "temperature": 1.5}
    whole = client.completions.create(prompt="The sea", n=2, **ask)
    texts, usage = ["", ""], None
    options: Any = {"include_usage": True}
    for chunk in client.completions.create(prompt="The sea", n=2, stream=True, stream_options=options, **ask):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] != texts[1]
    assert usage is not None
    assert usage.completion_tokens == 24
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [*client.completions.create(prompt="The sea", stream=True, stream_options=options, **ask)]
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts)
    assert (len(counts), counts[-1]) == (len(chunks), 12)


def test_a_model_by_its_name(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError, match="the model is 'tiny'"):
        client.models.retrieve("an-org/another")
    with pytest.raises(openai.NotFoundError, match="its model computes no embeddings"):
        client.embeddings.create(model="tiny", input="a")


def test_a_message_is_continued(client: openai.OpenAI, rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    messages: Any = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    text = small.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    ids = small.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    assert found.choices[0].message.content == small.tokenizer.decode(greedy(rnn, ids, 8), skip_special_tokens=True)
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(ids)


def test_chat(client: openai.OpenAI, rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
    ]
    plain = [{"role": m["role"], "content": "Who are you?" if m["role"] == "user" else "Be brief."} for m in messages]
    text = small.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    ids = small.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=8, temperature=0)
    expected = small.tokenizer.decode(greedy(rnn, ids, 8), skip_special_tokens=True)
    assert found.choices[0].message.content == expected
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True, logprobs=True, top_logprobs=2
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == expected
    assert chunks[0].delta.role == "assistant"
    assert chunks[-1].finish_reason == "length"
    entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or []]
    assert len(entries) == 8
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)


def test_a_history_that_is_sent_again_is_not_read_again(client: openai.OpenAI, address: str) -> None:
    """Ten turns: at each of them the server reads no more than what is new since the turn before."""
    messages: Any = []
    before = 0
    read = metrics(address)["prompt_tokens_read_total"]
    for turn in range(10):
        messages.append({"role": "user", "content": f"Message {turn} is about the sea, the wind and the old harbour."})
        found = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0)
        messages.append({"role": "assistant", "content": found.choices[0].message.content})
        assert found.usage is not None
        assert found.usage.prompt_tokens_details is not None
        new = found.usage.prompt_tokens - (found.usage.prompt_tokens_details.cached_tokens or 0)
        assert new <= found.usage.prompt_tokens - before
        assert new < 60
        before = found.usage.prompt_tokens
        read += new
    assert before > 250
    assert metrics(address)["prompt_tokens_read_total"] == read


def test_sessions(client: openai.OpenAI, address: str) -> None:
    def say(name: str, text: str) -> str:
        messages: Any = [{"role": "user", "content": text}]
        found = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=6, temperature=0, extra_body={"session_id": name}
        )
        return str(found.choices[0].message.content)

    headers = {"Authorization": f"Bearer {KEY}"}
    say("one", "My name is Ann.")
    assert httpx.post(f"{address}/v1/sessions/one/fork", json={"to": "two"}, headers=headers).status_code == 201
    assert say("one", "What is my name?") == say("two", "What is my name?")
    listed = httpx.get(f"{address}/v1/sessions", headers=headers).json()["data"]
    assert {(found["id"], found["turns"]) for found in listed} == {("one", 2), ("two", 2)}
    assert httpx.delete(f"{address}/v1/sessions/one", headers=headers).json()["deleted"]
    assert httpx.delete(f"{address}/v1/sessions/one", headers=headers).status_code == 404
    again = post(address, {"prompt": "a", "session_id": "two", "n": 2})
    assert again.status_code == 400
    httpx.delete(f"{address}/v1/sessions/two", headers=headers)


def test_a_session_that_is_in_use(address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(engine, monkeypatch)
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "session_id": "busy", "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()  # if nothing held it, the connection would be closed
        next(lines)
        found = post(address, {"prompt": "b", "session_id": "busy"})
        assert (found.status_code, found.json()["error"]["code"]) == (409, "session_error")


def test_stop_strings_and_bias(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "The sea", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**ask).choices[0].text
    cut = client.completions.create(**ask, stop=whole[10:13]).choices[0]
    assert cut.text == whole[: whole.index(whole[10:13])]
    assert cut.finish_reason == "stop"
    forced = client.completions.create(**ask, logit_bias={"500": 100}, logprobs=1).choices[0]
    assert forced.logprobs is not None
    assert len(set(forced.logprobs.tokens or [])) == 1


def test_keys_paths_and_methods(address: str) -> None:
    assert post(address, {"prompt": "a"}, key="wrong").status_code == 401
    assert httpx.get(f"{address}/v1/models").json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{address}/health").status_code == 200
    assert httpx.get(f"{address}/version").json() == {"version": msrnn.__version__}
    assert httpx.get(f"{address}/nowhere").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{address}/v1/completions", headers={"Authorization": f"Bearer {KEY}"}).status_code == 405
    models = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY).models.list()
    assert [model.id for model in models] == ["tiny"]


def test_metrics(client: openai.OpenAI, address: str) -> None:
    client.completions.create(model="tiny", prompt="a", max_tokens=3)
    text = httpx.get(f"{address}/metrics").text
    for name in (
        "num_requests_running",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "num_batch_slots 4.0",
    ):
        assert f"msrnn_{name}" in text


def test_a_client_that_leaves_frees_its_row(address: str, engine: msrnn.Engine) -> None:
    body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=0.5)
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{address}/v1/completions", json={**body, "stream": True}, headers=headers) as stream:
        next(stream.iter_lines())
    wait_until(lambda: engine.idle)
    assert engine.counts == Counts(waiting=0, prefill=0, running=0)


def test_a_client_that_leaves_while_it_waits(
    rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to send to it yet."""
    engine = msrnn.Engine(rnn, slots=1, tokenizer=small.tokenizer)
    slow_down(engine, monkeypatch)
    body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with running(engine, Limits()) as address, httpx.stream("POST", f"{address}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        with httpx.stream("POST", f"{address}/v1/completions", json=body):
            wait_until(lambda: engine.counts.waiting == 1)
        wait_until(lambda: engine.counts.waiting == 0)
        assert engine.counts == Counts(waiting=0, prefill=0, running=1)


def test_limits(rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue, a large body and a slow sender."""
    engine = msrnn.Engine(rnn, slots=1, tokenizer=small.tokenizer)
    fast = slow_down(engine, monkeypatch, 0.5)
    with running(engine, Limits(queue=1, body_bytes=1000, body_seconds=1)) as address:
        assert post(address, {"prompt": "a" * 2000}).status_code == 413
        host, port = address.removeprefix("http://").split(":")

        codes: list[int] = []

        async def ask(client: httpx.AsyncClient) -> httpx.Response:
            found = await client.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 40})
            codes.append(found.status_code)
            if codes.count(429) == 4:  # one is answered, and one waits
                fast.set()
            return found

        async def asked() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=60) as client:
                return await asyncio.gather(*(ask(client) for _ in range(6)))

        async def slow() -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
            reply = await reader.readline()
            writer.close()
            return reply

        found = asyncio.run(asked())
        assert sorted(codes) == [200] * 2 + [429] * 4
        assert all(each.headers["Retry-After"] for each in found if each.status_code == 429)
        assert b"408" in asyncio.run(slow())
        assert post(address, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_the_guide(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python of the guide runs; what starts a server has arguments that `msrnn.serve` takes."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text()
    blocks = re.findall(r"```py\n(.*?)```", guide, flags=re.DOTALL)
    starts = [block for block in blocks if "msrnn.serve(" in block]
    for call in [node for block in starts for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]:
        if ast.unparse(call.func) == "msrnn.serve":
            inspect.signature(msrnn.serve).bind(*call.args, **{str(given.arg): given for given in call.keywords})
    assert len(starts) == 2
    elsewhere = ("BaseModel", "tool_calls", "responses.create")  # see test_structured, test_tools and test_responses
    code = "".join(block for block in blocks if block not in starts and not any(word in block for word in elsewhere))
    assert code.count("create(") == 2
    code = code.replace("http://127.0.0.1:8000", address).replace('"none"', repr(KEY))
    exec(compile(code, "serving.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 2


def test_a_model_whose_layers_have_different_sizes(small: Loaded) -> None:
    """Pages and clients get the mean as a number, and the sizes beside it."""
    rnn = msrnn.MultiStateRNN(build(llama(vocab_size=len(small.tokenizer))), "tova:upper", 16)
    with running(msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer)) as found:
        (model,) = httpx.get(f"{found}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"]
    assert (model["policy"], model["size"], model["sizes"]) == ("tova", 16, [12, 20])
