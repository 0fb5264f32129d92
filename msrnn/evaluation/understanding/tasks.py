"""The tasks: what is asked, where it is from, and how answers are scored."""

from __future__ import annotations

from typing import NamedTuple

from msrnn.evaluation import prompts
from msrnn.evaluation.understanding.metrics import F1, ROUGE, Metric
from msrnn.evaluation.understanding.questions import QASPER_FORMS, SQUALITY_FORMS, Form
from msrnn.evaluation.understanding.sources import Hub


class Task(NamedTuple):
    name: str
    title: str
    prompt: str
    answer: int  # tokens that an answer may have
    hub: Hub
    forms: dict[str, Form]
    metric: Metric


SQUALITY = Task("squality", "SQuALITY", prompts.SQUALITY, 512, Hub("pszemraj/SQuALITY-v1.3"), SQUALITY_FORMS, ROUGE)
QASPER = Task(
    "qasper",
    "QASPER",
    prompts.QASPER,
    128,
    Hub("allenai/qasper", {"revision": "refs/convert/parquet"}),
    QASPER_FORMS,
    F1,
)
TASKS = {task.name: task for task in (SQUALITY, QASPER)}
