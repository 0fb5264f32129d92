from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from msrnn import MultiStateRNN
from msrnn.cli import main
from msrnn.cli.conversation import Conversation
from tests.helpers.command import Run, same

SIZE = ("--size", 16)
SHORT = ("--max-new-tokens", 12)


def test_chat_stays_bounded(run: Run, tmp_path: Path) -> None:
    lines = "".join(f"message {i}\n/state\n" for i in range(4))
    code, out, err = run("chat", *SIZE, *SHORT, "--save", tmp_path / "talk", stdin=lines)
    assert code == 0, err
    shown = re.findall(r"(\d+) tokens read, (\d+) KV rows held in each layer, (.*)", out)
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
    lines = f"hello\n/save {new}\n/save {new}\n/save {taken}\n/save a\0b\n/dance\n\n/quit\nno\n"
    code, out, err = run("chat", *SIZE, *SHORT, stdin=lines)
    assert code == 0
    assert err.count(f"{new}: ") == 2
    assert "taken: exists already" in err
    assert "null byte" in err
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


def test_past_the_length_positions_are_compressed_and_a_horizon_ends_memory(
    run: Run, short: Path, tmp_path: Path
) -> None:
    """From the turn on that may pass it, with one remark; a saved conversation continues in the same way."""
    messages = [f"message {i}, which is not short" for i in range(6)]
    words = ("chat", *SIZE, *SHORT, "--model", short, "--save", tmp_path / "talk")
    code, _, err = run(*words, stdin="\n".join(messages), small=True)
    assert code == 0
    rule = "--policy tova+1~64 --positions compressed"
    assert err.count(f"past the 200 tokens that this model was trained on, its state continues with {rule}") == 1

    rnn, extended = (
        MultiStateRNN(AutoModelForCausalLM.from_pretrained(short), policy, 16, positions=where)
        for policy, where in (("tova", "original"), ("tova+1~64", "compressed"))
    )
    settings = {"max_new_tokens": 12, "do_sample": False}
    tokenizer = AutoTokenizer.from_pretrained(short)
    talk = Conversation(rnn, tokenizer, rnn.state(), settings, extend=lambda _: extended)
    for message in messages:
        talk.turn(message)
    talk.state.save(tmp_path / "library")
    assert same(tmp_path / "talk", tmp_path / "library")

    more = (*words[:-1], tmp_path / "talk", "--load", tmp_path / "talk")
    code, _, err = run(*more, stdin="and on", small=True)
    assert (code, err.count("past the 200")) == (0, 0)


@pytest.mark.slow
def test_past_the_length_of_a_model_that_cannot(run: Run, short: Path) -> None:
    words = ("chat", *SIZE, *SHORT, "--model", short, "--policy", "full")
    code, _, err = run(*words, stdin="a\n" * 16, small=True)
    assert code == 0
    assert err.count("answers may get worse (policy 'full' keeps every token") == 1
    fixed = run("chat", *SIZE, *SHORT, "--model", short, "--positions", "original", stdin="a\n" * 16, small=True)
    assert (fixed.code, fixed.err.count("past")) == (0, 0)
