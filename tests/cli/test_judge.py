from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msrnn.evaluation.tasks.judge_models import EndpointJudge
from tests.helpers.command import Run
from tests.helpers.served import SECRET, answering, limited, served


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """Three pairs, one of which forgot nothing."""
    shared = {"fingerprint": "f", "dtype": "float32", "prompt": "p", "most": 99, "temperature": 1.0, "model": "tiny"}
    with (tmp_path / "story.jsonl").open("w") as file:
        for policy, size in (("full", None), ("tova", 8)):
            for seed, length in enumerate((3, 20, 30)):
                story = {"ids": [1] * length, "story": f"{policy} {seed}", "ended": True, "prompt_tokens": 4}
                file.write(json.dumps({**shared, "policy": policy, "size": size, "seed": seed, **story}) + "\n")
    return tmp_path


def test_an_endpoint(run: Run, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with served(limited, answering("(A)"), answering("(B)"), answering("(C)")) as server:
        words = ("judge", stories, "--judge", "gpt-4o", "--base-url", server.base_url)
        estimated = run(*words, "--estimate", "--price", 2.5, 10, small=True)
        assert (estimated.code, estimated.out, server.asked) == (0, "", [])
        assert "left to ask: 4 requests" in estimated.err
        assert "at 2.5 and 10 per million" in estimated.err
        assert [path.name for path in stories.iterdir()] == ["story.jsonl"]
        part = run(*words, "--max-requests", 3, small=True)
        assert "2 pairs; 1 more, in which nothing was evicted, are dropped" in part.err
        assert "Rate limit reached" in part.err
        assert "--max-requests 3: reached; left to ask: 2 requests" in part.err
        whole = run(*words, small=True)
        assert len(server.asked) == 5
        again = run(*words, small=True)
        assert (again.out, len(server.asked)) == (whole.out, 5)
    assert whole.code == 0
    assert "50%" in whole.out
    assert sorted(path.name for path in stories.iterdir()) == [
        *(f"judge.{kind}" for kind in ("csv", "jsonl", "md", "png", "svg")),
        "story.jsonl",
    ]
    written = b"".join(path.read_bytes() for path in stories.iterdir())
    assert SECRET.encode() not in written
    assert SECRET not in "".join(told for ran in (estimated, part, whole) for told in (ran.out, ran.err))


def test_answers_that_all_cannot_be_read_are_no_success(
    run: Run, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)
    with served(answering("Both have their charm.")) as server:
        words = ("judge", stories, "--judge", "a", "--base-url", server.base_url)
        code, out, err = run(*words, small=True)
        assert (code, "tova 8" in out) == (2, True)
        assert "a: none of its 8 answers can be read, the first is 'Both have their charm.'" in err.splitlines()[-1]
        assert run(*words, small=True).code == 2
        assert len(server.asked) == 8


def test_a_stopped_judgement_says_how_to_go_on(run: Run, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)
    original, calls = EndpointJudge.ask, list[int]()

    def stopped(judge: EndpointJudge, *arguments: Any) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(judge, *arguments)

    monkeypatch.setattr(EndpointJudge, "ask", stopped)
    with served(answering("(A)")) as server:
        words = ("judge", stories, "--judge", "a", "--base-url", server.base_url)
        code, _, err = run(*words, small=True)
        assert (code, "stopped; run the same command to continue" in err) == (130, True)
        code, _, err = run(*words, small=True)
        assert (code, "2 of 4 answers already done" in err) == (0, True)
        before = (stories / "judge.jsonl").read_text()
        assert run(*words, "--force", small=True).code == 0
        assert (stories / "judge.jsonl").read_text().startswith(before)
        assert len(server.asked) == 8


def test_a_story_without_its_text_is_named(run: Run, stories: Path) -> None:
    path = stories / "story.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"story"', '"tale"')
    path.write_text("\n".join([*lines, ""]))
    code, _, err = run("judge", stories, "--judge", "a", "--estimate", small=True)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{path}, line 3: damaged, without the field 'story'" in err


def test_an_answer_without_its_text_is_named(run: Run, stories: Path) -> None:
    path = stories / "judge.jsonl"
    path.write_text(json.dumps({"judge": "a", "prompt": "Which?"}) + "\n")
    code, _, err = run("judge", stories, "--judge", "a", "--estimate", small=True)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{path}, line 1: damaged, without the field 'answer'" in err


def test_a_local_model(run: Run, stories: Path) -> None:
    code, out, err = run("judge", stories, "--device", "cpu")
    assert code == 0, err
    assert "tova 8" in out
    rows = [json.loads(line) for line in (stories / "judge.jsonl").read_text().splitlines()]
    assert {row["seed"] for row in rows} == {1, 2}


def test_an_estimate_of_a_judgement_anew(run: Run, stories: Path) -> None:
    assert run("judge", stories, "--device", "cpu").code == 0
    (stories / "judge.jsonl").write_bytes((stories / "judge.jsonl").read_bytes() + b'{"judge"')
    before = {path.name: path.read_bytes() for path in stories.iterdir()}
    code, out, err = run("judge", stories, "--device", "cpu", "--estimate", "--force")
    assert (code, out) == (0, "")
    assert "left to ask: 4 requests" in err
    assert {path.name: path.read_bytes() for path in stories.iterdir()} == before
    assert "left to ask: 0 requests" in run("judge", stories, "--device", "cpu", "--estimate").err


def test_an_estimate_needs_neither_key_nor_package(run: Run, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, _, err = run("judge", stories, "--judge", "gpt-4o", "--estimate", "--out", stories / "none", small=True)
    assert code == 0
    assert "left to ask: 4 requests" in err
    assert not (stories / "none").exists()


def test_without_a_key_nothing_is_forgotten(run: Run, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (stories / "judge.jsonl").write_text("{}\n")
    code, _, err = run("judge", stories, "--judge", "gpt-4o", "--force", small=True)
    assert (code, "OPENAI_API_KEY" in err) == (2, True)
    assert (stories / "judge.jsonl").read_text() == "{}\n"


BAD = {
    "nobody": ([], "give either --judge"),
    "both": (["--judge", "a", "--model", "b"], "give either --judge"),
    "address": (["--model", "b", "--base-url", "http://x"], "--base-url http://x"),
    "requests": (
        ["--judge", "a", "--max-requests", "0"],
        "--max-requests 0: must be a whole number, 1 or more; --estimate",
    ),
    "timeout": (["--judge", "a", "--timeout", "0"], "--timeout 0: must be a number, 0.001 or more"),
    "key": (["--judge", "a"], "OPENAI_API_KEY"),
    "price": (["--judge", "a", "--price", "nan", "1"], "--price nan: must be a number, 0 or more"),
    "negative price": (["--judge", "a", "--price", "1", "-2"], "--price -2: must be"),
    "no address": (["--judge", "a", "--base-url", "localhost:8000"], "must begin with http://"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str, run: Run, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    words, told = BAD[name]
    code, out, err = run("judge", stories, *words, small=True)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert [path.name for path in stories.iterdir()] == ["story.jsonl"]


def test_no_stories(run: Run, tmp_path: Path) -> None:
    code, _, err = run("judge", tmp_path, "--judge", "a", small=True)
    assert (code, "generate stories first" in err) == (2, True)


def test_help_ends_with_examples(run: Run) -> None:
    code, out, _ = run("judge", "--help", small=True)
    assert code == 0
    examples = [line.strip() for line in out[out.index("Examples:") :].splitlines()[1:] if line.strip()]
    assert examples
    assert all(line.startswith("msrnn judge") for line in examples)
