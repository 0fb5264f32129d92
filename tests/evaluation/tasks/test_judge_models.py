"""Judges behind an endpoint: what is tried again, and what is refused."""

from __future__ import annotations

import pytest

from msrnn.evaluation.tasks.judge_models import Answer, EndpointJudge
from tests.helpers import served
from tests.helpers.served import SECRET, answering, asked

pytestmark = pytest.mark.usefixtures("api_key")


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        (served.limited, "Rate limit reached"),
        (served.failing, "The server had an error"),
        (served.nonsense, "not a chat completion"),
        (served.broken, ""),
        (served.hanging_up, ""),
        (served.slow, "timed out"),
    ],
    ids=["429", "500", "nonsense", "broken", "hangs up", "slow"],
)
def test_what_may_pass_is_tried_again(manner: served.Manner, reason: str) -> None:
    retries = list[str]()
    with served.served(manner, manner, answering("(A)")) as server:
        endpoint = asked(server.base_url, retries, timeout=1.5 if manner is served.slow else 60)
        found = endpoint.ask("Which?")
    assert found == Answer("(A)", {"find_answered": "served-model", "prompt_tokens": 11, "completion_tokens": 2})
    assert (endpoint.requests, len(server.asked), len(retries)) == (3, 3, 2)
    assert all(reason.lower() in retry.lower() and "trying again" in retry for retry in retries)
    assert server.asked[0]["messages"] == [{"role": "user", "content": "Which?"}]
    assert (server.asked[0]["model"], server.asked[0]["temperature"]) == ("a-judge", 0)


def test_waits_grow_and_an_endpoint_may_say_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr("openai._base_client.time.sleep", slept.append)
    with served.served(*[served.failing] * 4, served.limited, answering("B")) as server:
        EndpointJudge("a-judge", server.base_url).ask("Which?")
    assert slept[:4] == sorted(slept[:4])
    assert slept[0] < slept[3]
    assert slept[4] == 0.02


@pytest.mark.parametrize("manner", [served.refusing, served.unknown], ids=["401", "404"])
def test_what_will_not_pass_is_said_at_once_and_without_the_key(manner: served.Manner) -> None:
    with (
        served.served(manner) as server,
        pytest.raises(ValueError, match="judge 'a-judge': the endpoint refuses") as caught,
    ):
        asked(server.base_url, []).ask("Which?")
    assert len(server.asked) == 1
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_an_endpoint_that_refuses_connections_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with served.served(served.failing) as server:
        closed = server.base_url.replace("http://", "http://name:password@")
    retries = list[str]()
    endpoint = asked(closed, retries)
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:\d+/v1: no connection \(.*refused") as caught:
        endpoint.ask("Which?")
    assert (retries, endpoint.requests) == ([], 1)
    assert "Answers so far are kept: run the same command to resume" in str(caught.value)
    assert "password" not in str(caught.value)
