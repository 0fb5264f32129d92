from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from msrnn.engine.engine import Engine
from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError
from msrnn.server import protocol
from msrnn.server.errors import ApiError
from msrnn.server.protocol import Served, parse_chat, parse_completion
from tests.helpers.characters import BOS, character_tokenizer
from tests.helpers.fake_executor import FakeExecutor

OWNER = "0123456789abcdef"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def engine() -> Engine:
    """It has a session of one turn, which nothing has been read of but its prompt and answer."""
    engine = Engine(FakeExecutor(), tokenizer=character_tokenizer())
    engine.add(engine.request([80, 81], SamplingParams(max_tokens=3), "talk"))
    while not engine.idle:
        engine.step()
    return engine


@pytest.fixture
def served(engine: Engine) -> Served:
    return Served("tiny", engine.tokenizer, 16, 200, engine.sessions, {"temperature": 0.0, "top_k": 5})


def test_a_completion(served: Served) -> None:
    job = parse_completion({"prompt": ["ab", [7]], "n": 2, "top_k": 9, "stop": "x"}, served)
    assert job.prompts == [[BOS, 80 - 4, 80 - 3], [7]]
    params = job.params
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 9, 1.0)  # the request goes before the model
    assert (params.max_tokens, params.n, [*params.stop], params.logprobs) == (16, 2, ["x"], None)
    assert (job.stream, job.echo, job.session, job.turns, job.retention, job.texts) == (False, [], None, 0, 0, [])


def test_a_chat(served: Served) -> None:
    job = parse_chat({**HELLO, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}, served)
    assert (job.params.max_tokens, job.params.logprobs) == (3, 2)
    assert served.tokenizer.decode(job.prompts[0]).endswith("<user>hi<end>\n<model>")
    assert parse_chat({**HELLO, "logprobs": True}, served).params.logprobs == 0


def test_the_stream_and_its_usage(served: Served) -> None:
    def usage(**options: bool) -> tuple[bool, bool]:
        job = parse_completion({"prompt": "a", "stream": True, "stream_options": options}, served)
        return job.include_usage, job.continuous_usage

    assert usage() == usage(continuous_usage_stats=True) == (False, False)
    assert usage(include_usage=True) == (True, False)
    assert usage(include_usage=True, continuous_usage_stats=True) == (True, True)


def test_an_echo_has_its_log_probabilities(served: Served) -> None:
    job = parse_completion({"prompt": "ab", "echo": True, "logprobs": 3, "max_tokens": 0}, served)
    assert (job.params.logprobs, job.params.prompt_logprobs, job.params.max_tokens) == (3, 3, 0)
    assert [echo.text for echo in job.echo] == ["ab"]


def test_a_request_goes_on_with_a_session(served: Served) -> None:
    job = parse_completion(
        {"prompt": "a", "session_id": "talk", "session_turns": 1, "stream": True, "retention": 2}, served
    )
    assert (job.session, job.turns, job.prompts) == ("talk", 1, [[76]])  # without the token that opens a text
    (texts,) = job.texts
    assert (texts.stop, texts.pieces[-1]) == (6, "a")  # after two tokens, three of the answer, and this one
    other = parse_completion({"prompt": "a", "session_id": "talk"}, served, OWNER)
    assert (other.turns, other.prompts) == (0, [[BOS, 76]])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "session_id": "new"}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "session_id": "new"}, "logprobs"),
        ({"prompt": ["a", "b"], "session_id": "new"}, "prompt"),
        ({"session_turns": 1}, "session_turns"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"retention": 1}, "retention"),
        ({"prompt": [5] * 199, "max_tokens": 2}, "max_tokens"),
        ({"prompt": ""}, None),
    ],
)
def test_completions_that_are_refused(served: Served, body: dict[str, Any], param: str | None) -> None:
    if param is None:  # the token that opens a text is one
        assert parse_completion({"prompt": "a", **body}, served).prompts == [[BOS]]
        return
    with pytest.raises(ApiError) as error:
        parse_completion({"prompt": "a", **body}, served)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"messages": HELLO["messages"] * 2, "session_id": "talk"}, "messages"),
    ],
)
def test_chats_that_are_refused(served: Served, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_chat({**HELLO, **body}, served)
    assert (error.value.status, error.value.param) == (400, param)


def test_a_session_that_has_gone_on(served: Served) -> None:
    with pytest.raises(ApiError, match="has 1 finished turns, and not the 0 that this request follows") as error:
        parse_completion({"prompt": "a", "session_id": "talk", "session_turns": 0}, served)
    assert (error.value.status, error.value.param) == (409, "session_turns")


def test_log_probabilities_of_a_reply_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.server.protocol.MOST_PROMPT_LOGPROBS", 12)
    body = {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 1, "n": 2}
    parse_completion(body, served)
    with pytest.raises(ApiError, match="18 log probabilities of the prompt: this server returns 12 at most"):
        parse_completion({**body, "logprobs": 2}, served)


def test_defaults_that_are_shown(served: Served) -> None:
    shown = served.shown
    assert (shown["max_tokens"], shown["stated_defaults"]) == (16, ["temperature", "top_k"])
    assert (shown["defaults"]["temperature"], shown["defaults"]["top_p"]) == (0.0, 1.0)


def test_sampling_that_the_model_states_wrongly(engine: Engine) -> None:
    served = Served("tiny", engine.tokenizer, 16, 200, engine.sessions, {"temperature": -1})
    with pytest.raises((ApiError, UsageError), match="temperature"):
        parse_completion({"prompt": "a"}, served)


SYSTEM: dict[str, Any] = {"messages": [{"role": "system", "content": "be brief"}, *HELLO["messages"]]}


def test_what_a_request_protects(served: Served) -> None:
    assert parse_chat(SYSTEM, served).protect == 0
    assert parse_chat({**SYSTEM, "protect": "prompt"}, served).protect == "prompt"
    job = parse_chat({**SYSTEM, "protect": "system"}, served)
    assert isinstance(job.protect, int)
    text = served.tokenizer.decode(job.prompts[0][: job.protect])
    assert "be brief" in text
    assert "hi" not in text
    assert job.keeps_protected
    assert parse_chat({**HELLO, "protect": "system"}, served).protect == 0
    assert parse_completion({"prompt": "ab", "protect": "prompt"}, served).protect == "prompt"


def test_the_server_has_a_default_of_its_own(served: Served) -> None:
    system = replace(served, protect="system")
    assert parse_chat(SYSTEM, system).protect == parse_chat({**SYSTEM, "protect": "system"}, served).protect
    assert parse_chat({**SYSTEM, "protect": "none"}, system).protect == 0
    assert parse_completion({"prompt": "ab"}, system).protect == 0
    assert parse_completion({"prompt": "ab"}, replace(served, protect="prompt")).protect == "prompt"


def test_a_session_that_has_begun_keeps_its_system_message(served: Served) -> None:
    job = parse_chat({**HELLO, "session_id": "talk", "protect": "system"}, served)
    assert (job.protect, job.keeps_protected) == (0, True)
    assert not parse_chat({**HELLO, "session_id": "talk", "protect": "prompt"}, served).keeps_protected


@pytest.mark.parametrize("protect", ["all", 3, True])
def test_other_words_are_refused(served: Served, protect: Any) -> None:
    with pytest.raises(ApiError, match="protect"):
        parse_chat({**HELLO, "protect": protect}, served)
    with pytest.raises(ApiError, match="protect none or prompt"):
        parse_completion({"prompt": "ab", "protect": "system"}, served)


def test_a_last_message_that_is_continued(served: Served) -> None:
    """Its tokens count as the beginning of the answer, and what the state holds of them is reported as a message."""
    body: dict[str, Any] = {
        "messages": [*HELLO["messages"], {"role": "assistant", "content": "so"}],
        "stream": True,
        "retention": 2,
    }
    job = parse_chat(body, served)
    assert served.tokenizer.decode(job.prompts[0]).endswith("<model>so")
    assert job.params.continued == 2
    (texts,) = job.texts
    assert texts.messages is not None
    assert [(span.role, span.stop - span.start) for span in texts.messages] == [("user", 2), ("assistant", 2)]
    assert texts.messages[-1].stop == texts.stop == len(job.prompts[0])
    other = parse_chat({**body, "add_generation_prompt": True}, served)
    assert (other.params.continued, len(other.prompts[0])) == (0, len(job.prompts[0]) + 3)
    protected = parse_chat(
        {**body, "protect": "system", "messages": [*SYSTEM["messages"], body["messages"][-1]]}, served
    )
    assert isinstance(protected.protect, int)
    assert served.tokenizer.decode(protected.prompts[0][: protected.protect]).endswith("<user>")


def test_a_template_of_contents_alone(engine: Engine) -> None:
    """The model reads one token before the answer, at least."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    bare = Served("tiny", tokenizer, 16, 200, engine.sessions)
    job = parse_chat({"messages": [{"role": "assistant", "content": "so"}]}, bare)
    assert (len(job.prompts[0]), job.params.continued) == (2, 1)


def test_the_least_tokens_of_an_answer(served: Served) -> None:
    assert parse_completion({"prompt": "a", "min_tokens": 16}, served).params.min_tokens == 16
    assert parse_chat({**HELLO, "min_tokens": 3, "max_completion_tokens": 3}, served).params.min_tokens == 3
    with pytest.raises(ApiError, match="min_tokens=17: must be at most max_tokens, which is 16") as error:
        parse_completion({"prompt": "a", "min_tokens": 17}, served)
    assert (error.value.status, error.value.param) == (400, "min_tokens")


def test_a_continued_message_within_a_constraint_has_tokens_of_its_own() -> None:
    """A grammar would follow the template's line break as if it were the message's."""
    merged = SimpleNamespace(decode=lambda _: "\n\nyes")
    protocol.check_own_tokens(merged, [7, 8], "\n\nyes")
    with pytest.raises(ApiError, match="cannot be continued within a constraint"):
        protocol.check_own_tokens(merged, [7, 8], "\nyes")


def test_only_constraints_need_tokens_of_its_own(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": [*HELLO["messages"], {"role": "assistant", "content": "so"}]}
    assert parse_chat({**body, "guided_regex": "so.*"}, served).params.continued == 2
    monkeypatch.setattr(served.tokenizer, "decode", lambda *_, **__: "\nso")
    assert parse_chat(body, served).params.continued == 2
    with pytest.raises(ApiError) as refused:
        parse_chat({**body, "guided_regex": "so.*"}, served)
    assert refused.value.param == "messages"
