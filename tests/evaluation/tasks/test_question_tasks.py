from __future__ import annotations

from msrnn.evaluation.data.prompts import fill_template
from msrnn.evaluation.tasks.question_tasks import QASPER, SQUALITY


def test_prompts_are_filled_in_once() -> None:
    assert fill_template("{a} and {b}", a="{b}", b="{a}") == "{b} and {a}"
    assert fill_template(QASPER.prompt, document="D {x}", question="Q") == (
        "D {x}\n\nAnswer the question as concisely as you can, using a single phrase or sentence if possible. If the "
        'question cannot be answered based on the information in the article, write "unanswerable". If the question is '
        'a yes/no question, answer "yes", "no", or "unanswerable".\n\nQuestion:\n\nQ\n\nAnswer:'
    )
    assert fill_template(SQUALITY.prompt, document="D", question="Q") == (
        "D\n\nAnswer the question in a paragraph.\n\nQuestion:\n\nQ\n\nAnswer:"
    )
