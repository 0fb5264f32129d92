"""Each option has its effect."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msrnn.backends import resolve_backend
from msrnn.core.state_file import load_tensors
from msrnn.hf import state_options
from msrnn.policy import NAMES
from tests.helpers.command import TEXT, Run, same

CPU = ("--device", "cpu")
SIZE = ("--size", 16)
SHORT = ("--max-new-tokens", 12)
SEEDS = range(2)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def letters(count: int, step: int = 1) -> str:
    """A text of one token per letter."""
    return "".join(string.ascii_lowercase[(i * i + step * i) % 26] for i in range(count))


Written = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """`written("eval", "story", ...)`: the rows that an evaluation writes into a folder of its own."""
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)  # figures take most of the time
    made: list[Path] = []

    def written(*words: object) -> list[dict[str, Any]]:
        made.append(tmp_path / f"out{len(made)}")
        ran = run(*words, *CPU, "--out", made[-1])
        assert ran.code == 0, ran.err
        (path,) = made[-1].glob("*.jsonl")
        return rows(path)

    return written


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_top_p_and_temperature(verb: str, run: Run) -> None:
    """A tiny top-p or temperature makes sampling greedy with any seed; otherwise the seed decides."""
    asked, stdin = (("chat",), "hello\n") if verb == "chat" else (("generate", "hello"), "")

    def said(*sampling: object) -> str:
        ran = run(*asked, *SIZE, *SHORT, *sampling, stdin=stdin)
        assert ran.code == 0, ran.err
        return ran.out

    def sampled(top_p: float, temperature: float) -> list[str]:
        return [said("--top-p", top_p, "--temperature", temperature, "--seed", seed) for seed in SEEDS]

    assert set(sampled(1e-6, 2)) == set(sampled(1, 1e-4)) == {said("--greedy")}
    drawn = sampled(1, 2)
    assert len(set(drawn)) == len(SEEDS)
    assert drawn == sampled(1, 2)


def test_system_message_opens_the_conversation(run: Run, tmp_path: Path) -> None:
    words = ("chat", *SIZE, *SHORT, "--system", "answer briefly", "--save", tmp_path / "talk")
    said = run(*words, stdin="hello\n").out.removesuffix("\n")
    whole = f"<system>answer briefly<end>\n<user>hello<end>\n<model>{said}<end>\n"
    assert run("read", "-", *SIZE, "--save", tmp_path / "read", stdin=whole).code == 0
    assert same(tmp_path / "talk", tmp_path / "read")


ASKED = {"chat": (), "generate": ("-",), "read": ("-",)}
KEPT = [
    ("--positions", "original", "positions", "original"),
    ("--positions", "compact", "positions", "compact"),
    ("--positions", "compressed", "positions", "compressed:lnln"),
    ("--state-dtype", "int8", "dtype", "int8"),
    ("--policy", "window+4", "policy", "window+4"),
]


@pytest.mark.parametrize("verb", ASKED)
@pytest.mark.parametrize(("option", "value", "name", "expected"), KEPT)
def test_state_is_kept_as_asked(
    verb: str, option: str, value: str, name: str, expected: str, run: Run, tmp_path: Path
) -> None:
    speech = () if verb == "read" else SHORT
    ran = run(verb, *ASKED[verb], *SIZE, *speech, option, value, "--save", tmp_path / "state", stdin=TEXT)
    assert ran.code == 0, ran.err
    assert load_tensors(tmp_path / "state")[1][name] == expected


@pytest.mark.parametrize("verb", ASKED)
def test_backends_give_the_same_state(verb: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def resolved(name: str, device: Any) -> Any:
        used.append(name)
        return resolve_backend(name, device)

    monkeypatch.setattr(state_options, "resolve_backend", resolved)
    speech = () if verb == "read" else SHORT
    for backend in ("torch", "numba"):
        words = (verb, *ASKED[verb], *SIZE, *speech, *CPU, "--backend", backend, "--save", tmp_path / backend)
        used.clear()
        ran = run(*words, stdin=TEXT)
        assert (ran.code, set(used)) == (0, {backend}), ran.err
    assert same(tmp_path / "torch", tmp_path / "numba")


def test_explicit_positions_change_a_conversation(run: Run) -> None:
    places = ("auto", "original", "compact", "compressed")
    said = {place: run("chat", *SIZE, *SHORT, "--positions", place, stdin=f"{TEXT}\n").out for place in places}
    assert said["auto"] == said["original"]
    assert len(set(said.values())) == 3


def test_bench_of_states_of_other_dtypes_and_positions(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing.BUFFER_BYTES", {"cpu": 2**20})
    words = ("bench", "--random-weights", "tiny", *CPU, "--size", 8, "--length", 20, "--batch", 1, "--out", tmp_path)
    kinds = ("--state-dtype", "int8", "--state-dtype", "16-bit", "--positions", "compact")
    ran = run(*words, *kinds, small=True)
    assert ran.code == 0, ran.err
    held = {row["contender"]: row["value"] for row in rows(tmp_path / "efficiency.jsonl") if row["cell"] == "state"}
    assert {label for label in held if "tova" in label} == {"tova 8 int8 compact", "tova 8 compact"}
    assert held["tova 8 int8 compact"] < held["tova 8 compact"]


STORY = ("eval", "story", *SHORT, "--size", 200)


def told(found: list[dict[str, Any]]) -> dict[int, str]:
    return {row["seed"]: row["story"] for row in found if row["policy"] == "full"}


def test_seed_of_stories(written: Written) -> None:
    """--seed is the seed of the first story; a story depends on its own seed alone."""
    first, second = (told(written(*STORY, "--seed", seed, "--stories", 2)) for seed in (4, 5))
    assert (list(first), list(second)) == ([4, 5], [5, 6])
    assert first[5] == second[5]
    assert len({*first.values(), *second.values()}) == 3


def test_temperature_of_stories(written: Written) -> None:
    cold, warm, default = (
        written(*STORY, "--stories", 3, *heat) for heat in (("--temperature", 1e-4), ("--temperature", 2), ())
    )
    assert [found[0]["temperature"] for found in (cold, warm, default)] == [1e-4, 2, 1]
    assert len(set(told(cold).values())) == 1
    assert len({*told(warm).values(), *told(default).values()}) == 6


def stories() -> list[dict[str, Any]]:
    answers = [{"response_text": f"so, {n}"} for n in range(4)]
    asked = [{"question_text": f"Who is {who}?", "responses": answers} for who in ("she", "he")]
    return [{"metadata": {"passage_id": f"{n}"}, "document": letters(60, n), "questions": asked} for n in range(4)]


def papers() -> list[dict[str, Any]]:
    asked = [{"question": f"Is {what} shown?", "free_form_answer": "yes"} for what in ("this", "that")]
    return [{"title": f"{n}", "text": letters(60, n), "qas": asked} for n in range(4)]


@pytest.fixture(params=[("squality", stories), ("qasper", papers)], ids=["squality", "qasper"])
def exam(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[object, ...]:
    """A task on four documents with two questions each."""
    task, documents = request.param
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents()))
    words = ("eval", task, "--data", data, "--stage", "answer", "--no-chat", "--max-new-tokens", 5, "--length", 500)
    return (*words, *SIZE, "--policy", "tova")


def test_seed_of_questions(exam: tuple[object, ...], written: Written) -> None:
    """The seed selects the questions; a smaller --limit selects a subset."""

    def asked(seed: int, limit: int) -> frozenset[str]:
        found = written(*exam, "--seed", seed, "--limit", limit)
        return frozenset(row["name"] for row in found if "references" in row)

    two = [asked(seed, 2) for seed in SEEDS]
    assert {len(names) for names in two} == {2}
    assert len(set(two)) > 1
    assert asked(SEEDS[-1], 1) < two[-1]


def test_positions_of_an_exam(exam: tuple[object, ...], written: Written) -> None:
    names = {"auto": "original", "original": "original", "compact": "compact", "compressed": "compressed:lnln"}
    said = {}
    for given, name in names.items():
        answers = [row for row in written(*exam, "--positions", given) if "prediction" in row]
        assert {row["positions"] for row in answers} == {name}
        said[given] = tuple(row["prediction"] for row in answers)
    assert said["auto"] == said["original"]
    assert len(set(said.values())) == 3


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three texts of four chunks of 33 tokens each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for step, name in enumerate(("one", "two", "three")):
        (folder / f"{name}.txt").write_text(letters(128, step))
    return folder


FAR = ("eval", "extrapolation", "--tokens", 60, "--window", 10, "--leg", 60)


def test_books_of_an_extrapolation(texts: Path, written: Written) -> None:
    """The seed selects the books; a smaller --books selects a subset."""

    def read(books: int, seed: int) -> frozenset[str]:
        found = written(*FAR, "--text", texts, *SIZE, "--row", "tova@compact", "--books", books, "--seed", seed)
        return frozenset(name for row in found for name in row["texts"])

    two = [read(2, seed) for seed in SEEDS]
    assert {len(names) for names in two} == {2}
    assert len(set(two)) > 1
    assert read(1, SEEDS[-1]) < two[-1]


@pytest.mark.parametrize("size", [8, 12])
def test_horizon_of_an_extrapolation(size: int, texts: Path, written: Written) -> None:
    """Without --row, the last row has a horizon of four times the size."""
    found = written(*FAR, "--text", texts, "--books", 1, "--size", size)
    shown = list(dict.fromkeys((row["policy"], row["positions"], row["size"]) for row in found))
    assert len(shown) == 4
    assert shown[-1] == (f"echo+1~{4 * size}", "compressed:lnln", size)


def test_seed_of_chunks(texts: Path, written: Written) -> None:
    """The seed selects the chunks; fewer chunks are a subset."""

    def read(seed: int, chunks: int) -> frozenset[tuple[str, int]]:
        words = ("eval", "perplexity", "--text", texts, "--length", 33, *SIZE, "--policy", "tova")
        found = written(*words, "--seed", seed, "--chunks-per-book", chunks)
        return frozenset((book, start) for row in found for book, start in row["texts"])

    one_each = [read(seed, 1) for seed in SEEDS]
    assert [sorted(book for book, _ in chunks) for chunks in one_each] == [["one", "three", "two"]] * len(SEEDS)
    assert len(set(one_each)) == len(SEEDS)
    assert one_each[-1] < read(SEEDS[-1], 2)


def test_judgement_elsewhere(run: Run, tmp_path: Path) -> None:
    """--out has the results, and is resumed from; the folder of the stories is not changed."""
    source, out = tmp_path / "stories", tmp_path / "judged"
    source.mkdir()
    shared = {"fingerprint": "f", "dtype": "float32", "prompt": "p", "most": 99, "temperature": 1.0, "model": "tiny"}
    story = {"seed": 0, "ids": [1] * 20, "ended": True, "prompt_tokens": 4}
    pair = [{**shared, **story, "policy": name, "size": n, "story": name} for name, n in (("full", None), ("tova", 8))]
    (source / "story.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pair))
    words = ("judge", source, *CPU, "--out", out)
    ran = run(*words)
    assert ran.code == 0, ran.err
    assert [path.name for path in source.iterdir()] == ["story.jsonl"]
    assert sorted(path.suffix for path in out.iterdir()) == [".csv", ".jsonl", ".md", ".png", ".svg"]
    assert "left to ask: 0 requests" in run(*words).err


@pytest.mark.parametrize(("tokens", "size"), [(400, 100), (2100, 512)])
def test_default_size_of_a_page(tokens: int, size: int, run: Run, tmp_path: Path) -> None:
    """A quarter of the tokens, but no more than 512."""
    text = f"{letters(tokens - 2)}\n"  # after the token that opens it
    page = tmp_path / "page.html"
    ran = run("explore", "-", "--policy", "window", "--no-open", "--out", page, stdin=text)
    assert ran.code == 0, ran.err
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found
    shown = json.loads(found[1])
    assert (len(shown["tokens"]), shown["policies"][0]["size"]) == (tokens, size)


def test_policies_that_weigh_values(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = run("policies", small=True).out.splitlines()
    (header,) = ([cell.strip() for cell in line.split("┃")] for line in lines if "┃" in line)
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if line.startswith("│")]
    shown = {line[header.index("policy")]: line[header.index("value")] for line in cells}
    assert {name: shown[name] for name in NAMES} == {name: "yes" if NAMES[name].value_norm else "" for name in NAMES}
    assert (shown["echo"], shown["tova"]) == ("yes", "")
