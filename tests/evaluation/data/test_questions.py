from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from msrnn.evaluation.data.questions import (
    EXTRACTIVE,
    FREE,
    UNANSWERABLE,
    YES_NO,
    Question,
    QuestionSet,
    Reference,
    questions,
)
from msrnn.evaluation.tasks.question_tasks import QASPER, SQUALITY, QuestionTask

STORY: dict[str, Any] = {
    "metadata": {"passage_id": "63"},
    "document": "Once there was a ship.",
    "questions": [
        {
            "question_text": f"What is {what}?",
            "question_number": i,
            "responses": [{"response_text": f"{what} {n}"} for n in range(4)],
        }
        for i, what in enumerate(("it", "she"), start=1)
    ],
}


def annotated(**given: Any) -> dict[str, Any]:
    empty = {"unanswerable": False, "extractive_spans": [], "yes_no": None, "free_form_answer": "", "evidence": []}
    return {**empty, **given}


ANSWERS = [
    annotated(unanswerable=True),
    annotated(extractive_spans=["one", "two"]),
    annotated(free_form_answer="three"),
    annotated(yes_no=True),
    annotated(yes_no=False),
]
EXPECTED = [
    Reference("Unanswerable", UNANSWERABLE),
    Reference("one, two", EXTRACTIVE),
    Reference("three", FREE),
    Reference("Yes", YES_NO),
    Reference("No", YES_NO),
]
RELEASED = {
    "1909.1": {
        "title": "On ships",
        "abstract": "We sail.",
        "full_text": [
            {"section_name": "Sails", "paragraphs": ["White.", "Wide."]},
            {"section_name": None, "paragraphs": ["End."]},
        ],
        "qas": [{"question": "Why?", "question_id": "q1", "answers": [{"answer": answer} for answer in ANSWERS]}],
    }
}
ON_THE_HUB = {
    "id": "1909.1",
    "title": "On ships",
    "abstract": "We sail.",
    "full_text": {"section_name": ["Sails", None], "paragraphs": [["White.", "Wide."], ["End."]]},
    "qas": {"question": ["Why?"], "question_id": ["q1"], "answers": [{"answer": ANSWERS, "annotation_id": ["a"] * 5}]},
}
TEXT = "On ships\n\nWe sail.\n\nSails\nWhite.\nWide.\n\nEnd."


def read(path: Path | None, task: QuestionTask = QASPER, limit: int | None = None, seed: int = 0) -> QuestionSet:
    return questions(path, "test", task.hub, task.formats, limit, seed)


def written(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_squality(tmp_path: Path) -> None:
    found = read(written(tmp_path / "a.jsonl", STORY), SQUALITY)
    assert [(q.name, q.document, q.text, q.question) for q in found.questions] == [
        ("63/1", "63", "Once there was a ship.", "What is it?"),
        ("63/2", "63", "Once there was a ship.", "What is she?"),
    ]
    assert found.questions[1].references == [Reference(f"she {n}") for n in range(4)]
    assert "2 of 2 questions on 1 documents, in the format of SQuALITY" in found.summary()


@pytest.mark.parametrize("row", [RELEASED, ON_THE_HUB], ids=["as released", "as on the hub"])
def test_qasper(row: dict[str, Any], tmp_path: Path) -> None:
    found = read(written(tmp_path / "a.json", row))
    assert found.questions == [Question("1909.1/q1", "1909.1", TEXT, "Why?", EXPECTED)]


def test_papers_as_text_and_answers_that_are_missing(tmp_path: Path) -> None:
    asked = [{"question": "a?", "free_form_answer": None}, {"question": "b?", "free_form_answer": "No."}]
    found = read(written(tmp_path / "a.jsonl", {"title": "T", "text": "words", "qas": asked}))
    assert found.questions == [Question("T/2", "T", "words", "b?", [Reference("No.", YES_NO)])]
    assert (found.offered, found.unanswered) == (2, 1)


def test_leval(tmp_path: Path) -> None:
    row = {"instructions": ["a?", "b?"], "outputs": ["Unanswerable", "x"], "input": "words", "source": "scientific_qa"}
    found = read(written(tmp_path / "a.jsonl", row, row | {"instructions": ["c?", "d?"]}, row))
    assert len(found.questions) == found.offered == 4, "a line that is repeated counts once"
    assert [(q.name, q.question, q.references) for q in found.questions[:2]] == [
        ("1/1", "a?", [Reference("Unanswerable", UNANSWERABLE)]),
        ("1/2", "b?", [Reference("x", FREE)]),
    ]
    assert len({q.document for q in found.questions}) == 1, "two lines on one paper"


def test_scrolls_repeats_a_question_for_each_answer(tmp_path: Path) -> None:
    head, story, asked = "You are given a story.\n\n", "Story:\nA ship.\n\n", "Question:\nWhy?\n\nAnswer:"
    row = {
        "id": "x_1",
        "pid": "x",
        "input": head + story + asked,
        "document_start_index": len(head),
        "document_end_index": len(head + story),
        "query_start_index": len(head + story),
        "query_end_index": len(head + story + asked),
    }
    path = written(tmp_path / "a.jsonl", row | {"output": "one"}, row | {"output": "two"})
    (found,) = read(path, SQUALITY).questions
    assert (found.text, found.question, [one.text for one in found.references]) == ("A ship.", "Why?", ["one", "two"])
    with pytest.raises(ValueError, match="none of its 1 questions has a reference"):
        read(written(tmp_path / "zero.jsonl", row | {"output": None}), SQUALITY)


def test_fewer_are_among_those_of_more(tmp_path: Path) -> None:
    rows = [STORY | {"metadata": {"passage_id": str(i)}, "document": f"Ship {i}."} for i in range(10)]
    path = written(tmp_path / "a.jsonl", *rows)
    some, more, other = ({q.name for q in read(path, SQUALITY, n, s).questions} for n, s in ((4, 0), (9, 0), (9, 1)))
    assert (len(some), len(more)) == (4, 9)
    assert some < more != other
    assert len({name.partition("/")[0] for name in some}) == 2, "a document gives all its questions before the next"


BAD = {
    "none": (None, "no such file"),
    "empty.jsonl": ("\n", "empty"),
    "nested.jsonl": ("[" * 100_000, "line 1: not JSON"),
    "digits.jsonl": ("9" * 5000, "line 1: not JSON"),
    "words.jsonl": ('{"document": "a", "questions": []}\nwords\n', "line 2: not JSON"),
    "fields.jsonl": ('{"story": "a"}\n', "match no known format.*document, questions"),
    "later.jsonl": (f"{json.dumps(STORY)}\n" + '{"document": "a"}\n', "row 2.*no field 'questions'"),
    "void.jsonl": (json.dumps(STORY | {"document": " "}), "document of question '63/1' is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_source(name: str, tmp_path: Path) -> None:
    content, reason = BAD[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}.*{reason}"):
        read(tmp_path / name, SQUALITY)


ASKED = STORY["questions"][0]
PAPER = {"title": "T", "text": "words", "qas": [{"question": "a?", "free_form_answer": "yes"}]}
LEVAL = {"instructions": ["a?"], "outputs": ["x"], "input": "words"}
WORDLESS: dict[str, tuple[QuestionTask, dict[str, Any], str]] = {
    "no text of a story": (SQUALITY, STORY | {"document": None}, "the document of question '63/1' is None"),
    "no question": (SQUALITY, STORY | {"questions": [ASKED | {"question_text": None}]}, "the question of .* is None"),
    "a list for a question": (
        SQUALITY,
        STORY | {"questions": [ASKED | {"question_text": []}]},
        r"the question of .* is \[\]",
    ),
    "no response": (
        SQUALITY,
        STORY | {"questions": [ASKED | {"responses": [{"response_text": None}]}]},
        "a reference of question '63/1' is None",
    ),
    "no text of a paper": (QASPER, PAPER | {"text": None}, "the document of question 'T/1' is None"),
    "a number for a text": (QASPER, PAPER | {"text": 7}, "the document of question 'T/1' is 7"),
    "no question on a paper": (
        QASPER,
        PAPER | {"qas": [{"question": None, "free_form_answer": "yes"}]},
        "the question of question 'T/1' is None",
    ),
    "a number for an answer": (
        QASPER,
        RELEASED["1909.1"] | {"qas": [{"question": "Why?", "answers": [{"answer": annotated(free_form_answer=7)}]}]},
        "a reference of question '1/1' is 7",
    ),
    "no output": (QASPER, LEVAL | {"outputs": [None]}, "not a row of this format"),
    "no input": (QASPER, LEVAL | {"input": None}, "not a row of this format"),
}


@pytest.mark.parametrize("name", WORDLESS)
def test_words_that_are_missing(name: str, tmp_path: Path) -> None:
    task, row, reason = WORDLESS[name]
    path = written(tmp_path / "a.json", [row])
    with pytest.raises(ValueError, match=rf"a\.json, row 1: {reason}") as caught:
        read(path, task)
    assert "\n" not in str(caught.value)


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, **how: str) -> list[Any]:
        asked.append((name, how))
        return [STORY] if "SQuALITY" in name else [ON_THE_HUB]

    module: Any = ModuleType("datasets")
    module.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    assert [len(read(None, task).questions) for task in (SQUALITY, QASPER)] == [2, 1]
    assert asked == [
        ("pszemraj/SQuALITY-v1.3", {"split": "test"}),
        ("allenai/qasper", {"split": "test", "revision": "refs/convert/parquet"}),
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"msrnn\[eval\].*a file of questions"):
        read(None)
