from __future__ import annotations

import pytest

from msrnn.evaluation.cells import FULL_MODEL, Cell
from msrnn.evaluation.data.questions import EXTRACTIVE, FREE, UNANSWERABLE, YES_NO, Reference
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.answer_scores import F1, ROUGE, WORTH_PROCESSES, f1, normalise, rouge, scores, token_f1
from msrnn.evaluation.tasks.answers import Answers, Settings


def test_rouge_of_a_published_example() -> None:
    """The example of rouge-score's own documentation, which gives ROUGE-1 and -L; and all three by hand."""
    found = rouge("The quick brown dog jumps on the log.", [Reference("The quick brown fox jumps over the lazy dog")])
    assert [found.values[0], found.values[2]] == pytest.approx([70.58823529411765, 58.82352941176471])
    # In common of 8 and 9 words: 6. Of 7 and 8 bigrams: the-quick, quick-brown. In order: the quick brown jumps the.
    assert found.values == pytest.approx([100 * 2 * n / (a + b) for n, a, b in ((6, 8, 9), (2, 7, 8), (5, 8, 9))])


def test_rouge_takes_the_best_reference_of_each_measure() -> None:
    prediction = "one two three four"
    words, order = Reference("four two one three"), Reference("one two x y z")
    alone = [rouge(prediction, [reference]).values for reference in (words, order)]
    assert alone[0][0] == pytest.approx(100)
    assert (alone[0][1], alone[1][1]) == (0.0, pytest.approx(100 * 2 / 7))
    assert rouge(prediction, [words, order]).values == [max(pair) for pair in zip(*alone, strict=True)]
    assert rouge("walked", [Reference("walking")]).values[0] == 100, "words are stemmed"
    assert rouge("", [words]).values == [0, 0, 0]


def test_the_geometric_mean() -> None:
    assert ROUGE.overall([40.0, 10.0, 20.0]) == pytest.approx(20.0)
    assert ROUGE.overall([40.0, 0.0, 20.0]) == 0
    assert F1.overall([12.5]) == 12.5


def test_words_as_squad_compares_them() -> None:
    assert normalise("The  Eiffel-Tower, a  tower.") == "eiffeltower tower"
    assert normalise("An apple; the theatre") == "apple theatre"


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("the cat sat", "A cat sat.", 1.0),
        ("BERT and ELMo", "BERT", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("a b b", "b b b", 2 * 1 * (2 / 3) / (1 + 2 / 3)),  # "a" is an article
        ("nothing", "something", 0.0),
        ("", "Yes", 0.0),
        ("Yes.", "Yes", 1.0),
    ],
)
def test_token_f1_by_hand(prediction: str, truth: str, expected: float) -> None:
    assert token_f1(prediction, truth) == pytest.approx(expected)


def test_the_nearest_annotator_and_the_kind_of_the_answer() -> None:
    answers = [Reference("Unanswerable", UNANSWERABLE), Reference("relu, tanh", EXTRACTIVE), Reference("relu", FREE)]
    assert f1("they use relu and tanh", answers) == ([pytest.approx(100 * 4 / 7)], EXTRACTIVE)
    assert f1("unanswerable", answers) == ([100], UNANSWERABLE)
    assert f1("No", [Reference("Yes", YES_NO)]) == ([0], YES_NO)
    assert f1("selu", answers) == ([0], UNANSWERABLE), "the first, as in QASPER's own evaluation"


def test_scores_are_the_same_in_many_processes_and_made_once() -> None:
    """ROUGE is slow: other processes score what differs, and what two cells say alike counts once."""
    settings = Settings("squality", "f", "float32", False, 64, "original", 4)
    store, cells = Store(None), [FULL_MODEL, Cell("tova", 8)]
    keys = [f"q{i}" for i in range(WORTH_PROCESSES)]
    for i, key in enumerate(keys):
        row = {"question": key, "name": key, "document": key, "question_text": "?", "prompts": {64: [f"p{i}", 60, 0]}}
        store.append({**settings.key, **row, "references": [[f"the cat {i} sat there", ""], ["no cats", ""]]})
        for cell in cells:
            text = f"a cat {i}{' sits' * (cell == FULL_MODEL and i == 0)}"
            store.append({**settings.answer_key_of(cell), "prompt": f"p{i}", "prediction": text})
    answers, heard = Answers(store, settings), list[object]()
    found = scores(ROUGE, answers, cells, keys, heard.append, lambda: heard.append(1))
    assert heard == [WORTH_PROCESSES + 1] + [1] * (WORTH_PROCESSES + 1)
    assert found == scores(ROUGE._replace(slow=False), answers, cells, keys)
    assert found[FULL_MODEL][0] != found[cells[1]][0]
    assert found[FULL_MODEL][1:] == found[cells[1]][1:]
    assert len({tuple(score.values) for score in found[FULL_MODEL]}) > 1
