from __future__ import annotations

import csv
import json
import string
from pathlib import Path

import pytest

from msrnn.evaluation.store import Store
from tests.helpers.command import Run

TINY = ("--device", "cpu", "--length", 120, "--size", 80, "--max-new-tokens", 5)


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """Two stories, of which one is longer than a prompt may be, with two questions each."""
    path = tmp_path / "stories.jsonl"
    with path.open("w") as file:
        for name, length in {"long": 300, "short": 20}.items():
            asked = [
                {"question_text": f"Who is {who}?", "responses": [{"response_text": f"{who}, {n}"} for n in range(4)]}
                for who in ("she", "he")
            ]
            text = "".join(string.ascii_lowercase[(i * i + length) % 26] for i in range(length))
            file.write(json.dumps({"metadata": {"passage_id": name}, "document": text, "questions": asked}) + "\n")
    return path


def test_squality_writes_tables_and_a_figure(run: Run, stories: Path, tmp_path: Path) -> None:
    words = ("eval", "squality", *TINY, "--data", stories, "--out", tmp_path / "out", "--batch", 2, "--no-chat")
    code, out, err = run(*words)
    assert code == 0, err
    assert "4 of 4 questions on 2 documents, in the format of SQuALITY" in err
    assert "tokens of the document cut on average, in 2 of them" in err
    assert all(name in out for name in ("tova", "window+4", "truncated", "full", "against tova"))
    made = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert sorted(made) == [f"squality.{kind}" for kind in ("csv", "jsonl", "md", "png", "svg")]
    lines = list(csv.DictReader(made["squality.csv"].read_text().splitlines()))
    assert {(line["policy"], line["questions"]) for line in lines} == {
        (name, "4") for name in ("tova", "window+4", "truncated", "full")
    }
    rows = [json.loads(line) for line in made["squality.jsonl"].read_text().splitlines()]
    assert {row["source"] for row in rows if "prediction" in row} == {"stories.jsonl"}
    assert "- chat: False" in made["squality.md"].read_text()

    before = {name: path.read_bytes() for name, path in made.items()}
    again = run(*words)
    assert (again.code, again.out) == (0, out)
    assert "nothing left to compute" in again.err
    assert {name: path.read_bytes() for name, path in made.items()} == before


@pytest.mark.usefixtures("undrawn")
def test_rows_that_recall(run: Run, stories: Path, tmp_path: Path) -> None:
    words = ("eval", "squality", *TINY, "--data", stories, "--out", tmp_path / "out", "--no-chat", "--limit", 1)
    for more in (
        ("--policy", "tova"),
        ("--policy", "tova", "--policy", "truncated", "--recall", 8, "--against", "tova"),
    ):
        ran = run(*words, *more)
        assert ran.code == 0, ran.err
    assert "against tova + 8 recalled at the same size" in ran.out
    lines = csv.DictReader((tmp_path / "out" / "squality.csv").read_text().splitlines())
    assert [line["policy"] for line in lines] == ["tova + 8 recalled", "truncated", "tova"]


def test_answers_here_and_scores_elsewhere(
    run: Run, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("eval", "squality", *TINY, "--limit", 3, "--policy", "tova", "--policy", "full", "--out", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        assert run(*words, "--data", stories).err.count("rouge-score") == 1
        code, out, _ = run(*words, "--data", stories, "--stage", "answer")
    assert (code, out) == (0, "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["squality.jsonl"]
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)
    code, out, err = run(*words, "--stage", "score")
    assert (code, "3 of 3 questions are answered by all rows" in err) == (0, True)
    assert len(list((tmp_path / "out").iterdir())) == 5
    code, _, err = run(*words, "--stage", "score", "--policy", "window")
    assert (code, "window 80 none" in err) == (2, True)


def test_the_settings_that_are_scored(run: Run, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last that were used; or the last that have the values which are given."""
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)

    def answered(policy: str, *options: object) -> None:
        words = ("--data", stories, "--device", "cpu", "--max-new-tokens", 5, "--stage", "answer", *options)
        assert run("eval", "squality", "--out", tmp_path / "out", "--size", 16, "--policy", policy, *words).code == 0

    def scored(policy: str, *options: object) -> str:
        words = ("eval", "squality", "--out", tmp_path / "out", "--size", 16, "--policy", policy, "--stage", "score")
        code, _, err = run(*words, *options)
        assert code == 0, err
        return (tmp_path / "out" / "squality.md").read_text()

    answered("tova", "--length", 120)
    answered("tova", "--length", 100, "--no-chat", "--positions", "compressed")
    assert "- length: 100\n" in scored("tova")
    answered("window", "--length", 120)
    assert "- length: 120\n" in scored("window")
    assert "- length: 120\n" in scored("tova")
    for given in (("--length", 100), ("--no-chat",), ("--positions", "compressed"), ("--no-chat", "--length", 100)):
        assert "- length: 100\n" in scored("tova", *given)
    for given in (("--length", 120), ("--chat",), ("--positions", "original"), ("--max-new-tokens", 5)):
        assert "- length: 120\n" in scored("tova", *given)


@pytest.mark.parametrize("given", [("--length", 4096), ("--max-new-tokens", 6), ("--positions", "compact")])
def test_no_settings_match(given: tuple[object, ...], run: Run, stories: Path, tmp_path: Path) -> None:
    words = ("eval", "squality", "--out", tmp_path / "out", "--size", 16, "--policy", "tova", "--stage")
    assert run(*words, "answer", *TINY[:4], "--max-new-tokens", 5, "--data", stories).code == 0
    code, out, err = run(*words, "score", *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{given[1]}: no answers like this" in err
    assert "use length=120, positions=original, max_new_tokens=5, chat=True" in err


def test_the_report_has_the_positions_and_the_length_of_its_settings(run: Run, stories: Path, tmp_path: Path) -> None:
    """Though answers of the unbounded model, which come first, may have been computed at another length."""
    words: tuple[object, ...]
    words = ("eval", "squality", "--device", "cpu", "--data", stories, "--out", tmp_path / "out", "--size", 16)
    words += ("--max-new-tokens", 5, "--policy", "tova", "--policy", "full", "--no-chat")
    assert run(*words, "--length", 120).code == 0
    assert run(*words, "--length", 125, "--positions", "compact").code == 0
    text = (tmp_path / "out" / "squality.md").read_text()
    assert "- positions: compact\n" in text
    assert "- length: 125\n" in text


def test_a_folder_keeps_its_answers_and_shows_them_all(
    run: Run, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)
    words: tuple[object, ...]
    words = ("eval", "squality", "--device", "cpu", "--data", stories, "--out", tmp_path / "out", "--length", 120)
    words += ("--max-new-tokens", 5, "--no-chat")
    assert run(*words, "--size", 80, "--policy", "tova", "--policy", "truncated", "--policy", "full").code == 0
    path = tmp_path / "out" / "squality.jsonl"
    before = path.read_text()
    assert run(*words, "--size", 16, "--policy", "window").code == 0
    lines = list(csv.DictReader((tmp_path / "out" / "squality.csv").read_text().splitlines()))
    assert {(line["policy"], line["size"]) for line in lines} == {
        ("window", "16"),
        ("tova", "80"),
        ("truncated", "80"),
        ("full", "16"),
        ("full", "80"),
    }
    middle = path.read_text()
    code, _, err = run(*words, "--size", 16, "--policy", "window", "--force")
    assert (code, "already done" in err) == (0, False)
    after = path.read_text()
    assert after.startswith(middle)
    assert middle.startswith(before)
    added = [json.loads(line) for line in after[len(middle) :].splitlines()]
    assert {(row["policy"], row["size"]) for row in added} == {("window", 16)}
    assert len(added) == 4


@pytest.mark.parametrize("lacking", ["prediction", "prompt", "references", "prompts"])
def test_a_row_without_its_value_is_named(lacking: str, run: Run, stories: Path, tmp_path: Path) -> None:
    words = ("eval", "squality", *TINY, "--data", stories, "--out", tmp_path / "out", "--stage", "answer")
    assert run(*words, "--policy", "tova").code == 0
    path = tmp_path / "out" / "squality.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    number = next(i for i, row in enumerate(rows) if lacking in row)
    del rows[number][lacking]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(*words, "--policy", "tova")
    assert code == 2
    assert f"{path}, line {number + 1}: damaged, without the field" in err.splitlines()[-1]


def test_help_shows_the_defaults(run: Run) -> None:
    out = run("eval", "squality", "--help", small=True).out
    assert "4096" in out[out.index("--length") : out.index("--chat")]


def test_qasper_through_the_chat_template_past_the_length_of_the_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = {"title": "A ship", "text": "sea " * 700, "qas": [{"question": "Is it?", "free_form_answer": "yes"}]}
    (tmp_path / "papers.jsonl").write_text(json.dumps(paper))
    words = ("eval", "qasper", "--data", tmp_path / "papers.jsonl", "--out", tmp_path / "out", "--size", 32)
    code, _, err = run(*words, "--length", 2100, "--max-new-tokens", 3, "--policy", "tova", "--device", "cpu")
    assert code == 0, err
    assert err.count("bounded states use compressed positions") == 1
    text = (tmp_path / "out" / "qasper.md").read_text()
    assert "- positions: compressed:lnln" in text
    assert "- chat: True" in text
    assert "yes/no" in text


def test_an_interrupted_run_keeps_what_it_has(
    run: Run, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, calls = Store.append, list[int]()

    def stopped(self: Store, row: dict[str, object]) -> None:
        calls.extend([1] if "prediction" in row else [])
        if len(calls) == 3:
            raise KeyboardInterrupt
        append(self, row)

    monkeypatch.setattr(Store, "append", stopped)
    words = ("eval", "squality", *TINY, "--batch", 1, "--data", stories, "--out", tmp_path / "out", "--policy", "tova")
    first = run(*words)
    assert (first.code, "stopped; run the same command to continue" in first.err) == (130, True)
    rows = [json.loads(line) for line in (tmp_path / "out" / "squality.jsonl").read_text().splitlines()]
    assert len([row for row in rows if "prediction" in row]) == 2
    again = run(*words)
    assert (again.code, "2 of 4 answers already done" in again.err) == (0, True)
    assert len(calls) == 3 + 2


def test_the_paper_and_one_more(run: Run, stories: Path, tmp_path: Path) -> None:
    words = ("eval", "squality", "--data", stories, "--out", tmp_path / "out", "--limit", 1, "--max-new-tokens", 2)
    code, _, err = run(*words, "--paper", "--policy", "echo", "--length", 100, "--device", "cpu", "--no-chat")
    assert code == 0, err
    lines = list(csv.DictReader((tmp_path / "out" / "squality.csv").read_text().splitlines()))
    assert [line["policy"] for line in lines[::5]] == ["tova", "window+4", "truncated", "full", "echo"]
    assert [line["size"] for line in lines[:5]] == ["256", "512", "1024", "2048", "4096"]
    rows = (tmp_path / "out" / "squality.jsonl").read_text().splitlines()
    assert len(rows) == 2, "a question, and one answer: every size is longer than this prompt"


BAD = {
    "data": (["--data", "none"], "none: no such file"),
    "policy": (["--policy", "tovas"], "did you mean 'tova'?"),
    "limit": (["--limit", "0"], "--limit 0"),
    "answer": (["--max-new-tokens", "0"], "--max-new-tokens (--max-tokens) 0"),
    "against": (["--against", "h2o"], "add --policy h2o"),
    "paper": (["--paper", "--size", "8"], "--paper"),
    "length": (["--length", "0"], "--length 0"),
    "positions": (["--positions", "far"], "--positions far: "),
    "stage": (["--stage", "guess"], "guess"),
    "both": (["--stage", "score", "--force"], "--force"),
    "nothing to score": (["--stage", "score", "--out", "."], "no question of squality"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str, run: Run, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stories.parent)
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)  # refused before the slow part
    words, told = BAD[name]
    code, out, err = run("eval", "squality", *(() if name == "data" else ("--data", stories)), *words)
    assert (code, out) == (2, "")
    assert told in err.splitlines()[-1]
    assert [path.name for path in stories.parent.iterdir()] == ["stories.jsonl"]
