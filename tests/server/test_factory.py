from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.engine.lanes import LongEngine
from msrnn.errors import UsageError
from msrnn.hf.model_options import ModelOptions
from msrnn.server.affinity import assign_replica
from msrnn.server.call_formats import FORMATS
from msrnn.server.factory import make_replica, make_server
from msrnn.server.limits import Limits
from msrnn.server.server import Server
from msrnn.server.setup import Setup
from msrnn.size import Size
from tests.helpers.byte_tokenizer import byte_model, byte_tokenizer
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.tool_templates import HERMES, tool_tokenizer


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(character_model(), "tova", 16)


def make(rnn: msrnn.MultiStateRNN, number: int = 0, count: int = 1, **settings: Any) -> Server:
    return make_server(Setup("tiny", slots=1, **settings), Limits(), rnn, character_tokenizer(), False, number, count)


def test_settings_reach_the_server(rnn: msrnn.MultiStateRNN, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rnn.model.generation_config, "temperature", 0.3)
    served = make(rnn, max_tokens=7, max_total_tokens=99).served
    assert (served.name, served.default_tokens, served.most_tokens) == ("tiny", 7, 99)
    assert (served.defaults, served.allow_special) == ({"temperature": 0.3}, False)
    served = make(rnn, generation_config="none", allow_special_tokens=True).served
    assert (served.defaults, served.allow_special) == ({}, True)


def test_positions_auto_have_a_second_lane(rnn: msrnn.MultiStateRNN) -> None:
    options = ModelOptions(size=Size(16))
    assert isinstance(make(rnn, auto=True, model=options).engine, LongEngine)
    assert not isinstance(make(rnn, model=options).engine, LongEngine)


def test_replicas_share_the_folder_and_not_its_sessions(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sessions": tmp_path / "sessions", "prefix_states": tmp_path / "prefixes"}
    names = [f"s{number}" for number in range(6)]
    engine = make(rnn, **settings).engine
    for name in names:
        engine.add(engine.request([80], msrnn.SamplingParams(max_tokens=1), name))
    while not engine.idle:
        engine.step()
    engine.close()
    assert [path.name for path in (tmp_path / "prefixes").iterdir() if path.is_dir()] == []
    for number in range(2):
        sessions = make(rnn, number, 2, **settings).engine.sessions
        found = sorted(info.name for info in sessions.infos())
        assert found == [name for name in names if assign_replica(name, 2) == number]
    assert sorted(path.name for path in (tmp_path / "prefixes").iterdir()) == ["replica-0", "replica-1"]


def test_a_replica_loads_the_model_itself(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    rnn.model.save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    options = ModelOptions(model=str(tmp_path / "model"), size=Size(16), device="cpu")
    setup = Setup("tiny", options, slots=1, sessions=tmp_path / "sessions")
    marker = tmp_path / "sessions" / ".replicas"
    with pytest.raises(UsageError, match="not the same folder on every machine; name one that all share"):
        make_replica(setup, Limits(), marker, 2, 1)
    marker.parent.mkdir()
    marker.touch()
    server = make_replica(setup, Limits(), marker, 2, 1)
    (request,) = server.engine.generate([[80, 81]], msrnn.SamplingParams(max_tokens=2), progress=False)
    assert request.finished


def test_a_draft_model_has_the_same_tokens(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    rnn.model.save_pretrained(tmp_path)
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    draft = ModelOptions(str(tmp_path), device="cpu")
    server = make(rnn, guesses=4, draft=draft)
    (request,) = server.engine.generate([[80, 81]], msrnn.SamplingParams(max_tokens=9), progress=False)
    assert request.finished
    assert server.engine.draft is not None
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(tmp_path)
    assert make(rnn, guesses=4, draft=draft).engine.draft is not None, "models of a family may have some more"
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="has other tokens than the model; use a smaller model of the same family"):
        make(rnn, guesses=4, draft=draft)
    with pytest.raises(UsageError, match="cannot take guesses back"):
        make_server(Setup("tiny", guesses=4, draft=draft), Limits(), rnn, tokenizer, shared=True)


def test_another_chat_template_reaches_the_server(rnn: msrnn.MultiStateRNN) -> None:
    tokenizer = character_tokenizer()
    own = tokenizer.chat_template
    server = make_server(Setup("tiny", slots=1, chat_template="{{ messages }}"), Limits(), rnn, tokenizer)
    assert server.served.tokenizer.chat_template == server.engine.tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.chat_template == own
    assert make(rnn).served.tokenizer.chat_template == own


def test_the_format_of_calls_is_that_of_the_template_or_of_the_option() -> None:
    bytes_rnn, tokenizer = msrnn.MultiStateRNN(byte_model(), "tova", 16), tool_tokenizer("mistral")
    ways: list[tuple[dict[str, Any], str]] = [
        ({}, "mistral"),
        ({"tool_call_parser": "llama3_json"}, "llama3_json"),
        ({"chat_template": HERMES}, "hermes"),
    ]
    for settings, form in ways:
        server = make_server(Setup("tiny", slots=1, **settings), Limits(), bytes_rnn, tokenizer)
        assert server.served.calls == FORMATS[form]


def test_a_format_for_a_template_without_tools(rnn: msrnn.MultiStateRNN) -> None:
    assert make(rnn).served.calls is None
    with pytest.raises(UsageError, match="tool_call_parser='hermes': this model's chat template knows no tools"):
        make(rnn, tool_call_parser="hermes")
