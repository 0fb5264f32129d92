from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Run, same
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from msrnn import MultiState, MultiStateRNN
from msrnn.cli import conversation, main
from msrnn.cli.conversation import Conversation
from msrnn.cli.options import Speech
from msrnn.cli.voice import Voice
from msrnn.hf import chat_template as turns

SIZE = ("--size", 16)
SHORT = ("--max-new-tokens", 12)
END = 2


class Ending(Speech):
    """Answers that end with the token that ends answers, not for want of room."""

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "forced_eos_token_id": END}


@pytest.fixture
def rnn(folder: Path) -> MultiStateRNN:
    return MultiStateRNN(AutoModelForCausalLM.from_pretrained(folder), "tova", 16)


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of every answer, as they are said."""
    said: list[list[int]] = []

    class Overheard(Voice):
        def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
            super().__init__(tokenizer)
            said.append(self.ids)

    monkeypatch.setattr(conversation, "Voice", Overheard)
    return said


def after(rnn: MultiStateRNN, tokenizer: PreTrainedTokenizerBase, messages: list[tuple[str, str]]) -> MultiState:
    """The state of a model that reads the conversation as one text, by its template."""
    roles = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(roles, tokenize=False)
    state = rnn.state()
    rnn.read(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]]), state)
    return state


def assert_same(one: MultiState, other: MultiState) -> None:
    assert one.seen.tolist() == other.seen.tolist()
    for a, b in zip(one.layers, other.layers, strict=True):
        order, other_order = a.position[0, 0].argsort(), b.position[0, 0].argsort()
        assert a.position[0, 0, order].tolist() == b.position[0, 0, other_order].tolist()
        torch.testing.assert_close(a.keys[0, :, order[1:]], b.keys[0, :, other_order[1:]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("speech", [Speech, Ending])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_state_is_that_of_the_whole_conversation(
    rnn: MultiStateRNN,
    tokenizer: PreTrainedTokenizerBase,
    answers: list[list[int]],
    speech: type[Speech],
    system: str | None,
) -> None:
    talk = Conversation(rnn, tokenizer, rnn.state(), speech(12, False, None, None), system)
    asked = ["hello", "how are you?", "(an earlier answer)"]
    for message in asked:
        talk.turn(message)
    assert all((ids[-1] == END) == (speech is Ending) for ids in answers)
    said = [tokenizer.decode(ids).removesuffix("<end>") for ids in answers]
    turns_ = [pair for q, a in zip(asked, said, strict=True) for pair in (("user", q), ("assistant", a))]
    assert_same(talk.state, after(rnn, tokenizer, [*([("system", system)] if system else []), *turns_]))


def test_ctrl_c_keeps_what_was_said(
    rnn: MultiStateRNN,
    tokenizer: PreTrainedTokenizerBase,
    answers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talk = Conversation(rnn, tokenizer, rnn.state(), Speech(12, False, None, None))
    talk.turn("hello")
    put = conversation.Voice.put

    def interrupted(self: Voice, value: torch.Tensor) -> None:
        put(self, value)
        if len(self.ids) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(conversation.Voice, "put", interrupted)
    talk.turn("again")
    assert [len(ids) for ids in answers] == [12, 3]
    first, second = (tokenizer.decode(ids) for ids in answers)
    messages = [("user", "hello"), ("assistant", first), ("user", "again"), ("assistant", second)]
    assert_same(talk.state, after(rnn, tokenizer, messages))


def test_chat_stays_bounded(run: Run, tmp_path: Path) -> None:
    lines = "".join(f"message {i}\n/state\n" for i in range(4))
    code, out, err = run("chat", *SIZE, *SHORT, "--save", tmp_path / "talk", stdin=lines)
    assert code == 0, err
    shown = re.findall(r"(\d+) tokens read, (\d+) states held in each layer, (.*)", out)
    assert len(shown) == 4
    seen, held, size = zip(*shown, strict=True)
    assert sorted(map(int, seen)) == list(map(int, seen))
    assert len(set(seen)) == 4
    assert set(held) == {"16"}
    assert len(set(size)) == 1
    assert (tmp_path / "talk").is_file()


def test_a_loaded_conversation_goes_on(run: Run, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    together = run("chat", *SIZE, *SHORT, "--save", one, stdin="hello\nand you?\n")
    first = run("chat", *SIZE, *SHORT, "--save", two, stdin="hello\n")
    second = run("chat", *SIZE, *SHORT, "--load", two, "--save", two, stdin="and you?\n/quit\nnever read\n")
    assert together.code == first.code == second.code == 0
    assert together.out == first.out + second.out
    assert same(one, two)


def test_commands(run: Run, tmp_path: Path) -> None:
    new, taken = tmp_path / "new", tmp_path / "taken"
    taken.write_text("mine")
    lines = f"hello\n/save {new}\n/save {new}\n/save {taken}\n/dance\n\n/quit\nno\n"
    code, out, err = run("chat", *SIZE, *SHORT, stdin=lines)
    assert code == 0
    assert err.count(f"{new}: ") == 2
    assert "taken: exists already" in err
    assert "/dance: commands are" in err
    assert taken.read_text() == "mine"
    assert out == run("chat", *SIZE, *SHORT, stdin="hello\n").out


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of standard input, which the locale decides
def test_bytes_that_are_no_utf8(
    errors: str, run: Run, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"hello \xff\nagain\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", lines)
    system = b"be \xfe".decode("utf-8", "surrogateescape")
    words = [str(word) for word in ("chat", *SIZE, *SHORT, "--model", folder)]
    assert main([*words, "--system", system]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 2
    assert said == run("chat", *SIZE, *SHORT, "--system", "be \ufffd", stdin="hello \ufffd\nagain\n").out


def test_model_without_template(run: Run, folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    code, _, err = run("chat", "--model", bare, small=True)
    assert (code, err.count("\n")) == (2, 1)
    assert "no chat template" in err


def test_template_that_refuses(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(ValueError, match="no system role here"):
        turns.opening(tokenizer, "hello", "be brief")


@pytest.fixture
def short(folder: Path, tmp_path: Path) -> Path:
    """The same model, which says that it was made for 200 tokens."""
    path = shutil.copytree(folder, tmp_path / "short")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 200}))
    return path


def test_past_the_length_positions_are_compressed_and_a_horizon_ends_memory(
    run: Run, short: Path, tmp_path: Path
) -> None:
    """From the turn on that may pass it, which is said once; a saved conversation goes on as it was."""
    asked = [f"message {i}, which is not short" for i in range(6)]
    words = ("chat", *SIZE, *SHORT, "--model", short, "--save", tmp_path / "talk")
    code, _, err = run(*words, stdin="\n".join(asked), small=True)
    assert code == 0
    assert err.count("past the 200 tokens that this model was made for, positions are compressed, and what is") == 1

    rnn, beyond = (
        MultiStateRNN(AutoModelForCausalLM.from_pretrained(short), policy, 16, positions=where)
        for policy, where in (("tova", "original"), ("tova+1~200", "compressed"))
    )
    tokenizer = AutoTokenizer.from_pretrained(short)
    talk = Conversation(rnn, tokenizer, rnn.state(), Speech(12, False, None, None))
    switched = []
    for message in asked:
        ids = tokenizer(talk._render(message), add_special_tokens=False)["input_ids"]
        if not switched and int(talk.state.seen[0]) + len(ids) + 12 + len(talk.closing) > 200:
            switched.append(int(talk.state.seen[0]))
            talk.rnn, talk.state = beyond, beyond.convert_state(talk.state)
        talk.turn(message)
    assert switched[0] > 100
    assert_same(beyond.load(tmp_path / "talk"), talk.state)

    more = (*words[:-1], tmp_path / "talk", "--load", tmp_path / "talk")
    code, _, err = run(*more, stdin="and on", small=True)
    assert (code, err.count("past the 200")) == (0, 0)


def test_past_the_length_of_a_model_that_cannot(run: Run, short: Path) -> None:
    """What helps nothing is said, too."""
    words = ("chat", *SIZE, *SHORT, "--model", short, "--policy", "full")
    code, _, err = run(*words, stdin="a\n" * 16, small=True)
    assert code == 0
    assert err.count("answers may get worse (positions='compressed:lnln': policy 'full'") == 1
    fixed = run("chat", *SIZE, *SHORT, "--model", short, "--positions", "original", stdin="a\n" * 16, small=True)
    assert (fixed.code, fixed.err.count("past")) == (0, 0)
