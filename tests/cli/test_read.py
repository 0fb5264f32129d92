from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from msrnn import MultiStateRNN
from tests.helpers.command import TEXT, Run, same


def test_read_saves_a_bounded_state(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    code, out, err = run("read", tmp_path / "text", "--save", tmp_path / "state", "--size", 16)
    assert (code, err) == (0, "")  # no remark on the length either
    assert f"{1 + len(TEXT)} tokens read, 16 KV rows held" in out
    assert load_file(tmp_path / "state")["0.keys"].shape[2] == 17


def test_reading_on_is_reading_in_one_go(run: Run, tmp_path: Path) -> None:
    (tmp_path / "half").write_text(TEXT[:100])
    assert run("read", "-", "--save", tmp_path / "whole", "--size", 16, stdin=TEXT).code == 0
    assert run("read", tmp_path / "half", "--save", tmp_path / "part", "--size", 16).code == 0
    assert not same(tmp_path / "whole", tmp_path / "part")
    more = ("read", "-", "--load", tmp_path / "part", "--save", tmp_path / "part", "--size", 16)
    assert run(*more, stdin=TEXT[100:]).code == 0
    assert same(tmp_path / "whole", tmp_path / "part")


def test_layers_of_different_sizes(run: Run, tmp_path: Path) -> None:
    """What is told are the sum and the mean; what is saved goes on without naming the budget again."""
    code, out, err = run("read", "-", "--save", tmp_path / "state", "--policy", "tova:upper", "--size", 16, stdin=TEXT)
    assert (code, err) == (0, "")
    assert f"{1 + len(TEXT)} tokens read, 32 KV rows held, 16 in a layer on average" in out
    saved = load_file(tmp_path / "state")
    assert [saved[f"{i}.keys"].shape[2] for i in range(2)] == [13, 21]
    assert run("read", "-", "--save", tmp_path / "same", "--size", "16:upper", stdin=TEXT).code == 0
    assert same(tmp_path / "state", tmp_path / "same")
    done = run("generate", "abc", "--state", tmp_path / "state", "--max-new-tokens", 4)
    assert done.code == 0, done.err
    assert run("read", "-", "--load", tmp_path / "state", "--save", tmp_path / "more", stdin="abc").code == 0
    assert load_file(tmp_path / "more")["1.keys"].shape[2] == 21
    refused = run("generate", "abc", "--state", tmp_path / "state", "--size", 16)
    assert refused.code == 2
    assert "--size 16" in refused.err


def test_full_ignores_the_size(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("read", "-", "--save", tmp_path / "state", "--policy", "full", "--size", 16, stdin=TEXT)
    assert code == 0
    assert f"{1 + len(TEXT)} KV rows held" in out


def test_force_replaces(run: Run, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("old")
    assert run("read", "-", "--save", tmp_path / "state", stdin="abc").code == 2
    assert (tmp_path / "state").read_text() == "old"
    assert run("read", "-", "--save", tmp_path / "state", "--force", stdin="abc").code == 0
    assert len(load_file(tmp_path / "state")) > 0


def test_interrupted_read_leaves_no_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MultiStateRNN, "read", interrupted)
    code, out, err = run("read", "-", "--save", tmp_path / "state", stdin=TEXT)
    assert (code, out, err.strip()) == (130, "", "msrnn: stopped before anything was read")
    assert list(tmp_path.iterdir()) == []


def test_rounded_states(run: Run, tmp_path: Path) -> None:
    small, large = tmp_path / "int8", tmp_path / "float32"
    for path, how in ((small, ("--state-dtype", "int8")), (large, ())):
        assert run("read", "-", "--save", path, "--size", 16, *how, stdin=TEXT).code == 0
    assert small.stat().st_size < large.stat().st_size
    code, _, err = run("generate", "abc", "--state", small, "--state-dtype", "fp8")
    assert code == 2
    assert f"--state-dtype fp8: {small} was saved with --state-dtype int8" in err
    code, _, err = run("generate", "abc", "--state", large, "--state-dtype", "int8")
    assert code == 2
    assert f"--state-dtype int8: {large} was saved without --state-dtype" in err
    said = ("generate", "abc", "--state", small, "--size", 16, "--state-dtype", "int8", "--max-new-tokens", 4)
    assert run(*said).code == 0
    assert "--state-dtype int4: must be int8 or fp8" in run("generate", "abc", "--state-dtype", "int4").err


def test_positions(run: Run, tmp_path: Path) -> None:
    state, plain = tmp_path / "compressed", tmp_path / "original"
    how = ("--size", 16, "--positions", "compressed")
    assert run("read", "-", "--save", state, *how, stdin=TEXT).code == 0
    assert run("read", "-", "--save", plain, "--size", 16, stdin=TEXT).code == 0
    assert not same(state, plain)
    code, _, err = run("generate", "abc", "--state", state, "--positions", "original")
    assert code == 2
    assert f"--positions original: {state} was saved with --positions compressed:lnln" in err
    said = run("generate", "abc", "--state", state, *how, "--max-new-tokens", 8)
    assert (said.code, said.out) == (0, run("generate", TEXT + "abc", *how, "--max-new-tokens", 8).out)
    assert "did you mean 'compressed" in run("generate", "abc", "--positions", "compresed").err


def test_a_protected_text_stays(run: Run, tmp_path: Path) -> None:
    rules, kept, plain = "Answer in rhyme.", tmp_path / "kept", tmp_path / "plain"
    for path, more in ((kept, ("--protect",)), (plain, ())):
        assert run("read", "-", "--save", path, "--size", 32, *more, stdin=rules).code == 0
        assert run("read", "-", "--state", path, "--save", path, stdin=TEXT).code == 0
    first = {*range(1 + len(rules))}
    held = {path: {*load_file(path)["0.position"].flatten().tolist()} for path in (kept, plain)}
    assert first <= held[kept]
    assert not first <= held[plain]
    told = "17 protected tokens of"
    chats = {how: run("chat", "--state", kept, "--protect", how, stdin="").err for how in ("none", "system")}
    assert (told in chats["none"], told in chats["system"]) == (True, False)


def test_more_than_fits_is_not_protected(run: Run, tmp_path: Path) -> None:
    refused = run("read", "-", "--save", tmp_path / "state", "--size", 32, "--protect", stdin=TEXT)
    assert (refused.code, [*tmp_path.iterdir()]) == (2, [])
    assert f"--protect: {1 + len(TEXT)} tokens: 31 fit; of 32 KV rows per layer" in refused.err
    assert "read fewer --tokens, use a larger --size, or leave --protect out" in refused.err
    assert (
        run("read", "-", "--save", tmp_path / "state", "--size", 32, "--protect", "--tokens", 31, stdin=TEXT).code == 0
    )
