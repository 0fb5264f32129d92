"""Questions on long documents: the paper's SQuALITY and QASPER, their prompts and metrics."""

from __future__ import annotations

from typing import NamedTuple

from msrnn.evaluation.data import prompts
from msrnn.evaluation.data.questions import (
    QASPER_FORMATS,
    QASPER_HUB,
    SQUALITY_FORMATS,
    SQUALITY_HUB,
    Format,
    Hub,
)
from msrnn.evaluation.tasks.answer_scores import F1, ROUGE, Metric


class QuestionTask(NamedTuple):
    """A set of questions on documents, and how answers are scored."""

    name: str
    title: str
    prompt: str
    answer: int  # tokens of an answer, at most
    hub: Hub
    formats: dict[str, Format]
    metric: Metric


SQUALITY = QuestionTask("squality", "SQuALITY", prompts.SQUALITY, 512, SQUALITY_HUB, SQUALITY_FORMATS, ROUGE)
QASPER = QuestionTask("qasper", "QASPER", prompts.QASPER, 128, QASPER_HUB, QASPER_FORMATS, F1)
TASKS = {task.name: task for task in (SQUALITY, QASPER)}
