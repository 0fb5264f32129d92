"""Answers to questions on long documents by policy and size: the paper's SQuALITY and QASPER."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel

from msrnn.core.rope import COMPRESSED, ORIGINAL, name_of, spacing
from msrnn.engine.engine import Engine
from msrnn.engine.offline import full_model_rnn
from msrnn.engine.requests import SamplingParams
from msrnn.errors import FileError
from msrnn.evaluation.cells import UNBOUNDED, Cell, cell_of
from msrnn.evaluation.data.prompts import Prompt, PromptBuilder
from msrnn.evaluation.data.questions import (
    Question,
)
from msrnn.evaluation.environment import backend_names, model_key
from msrnn.evaluation.generation import answer_prompts
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.evaluation.tasks.answers import Answers, Settings
from msrnn.evaluation.tasks.question_tasks import QuestionTask
from msrnn.hf.loading import Loaded
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.stop_tokens import stop_tokens_of

AUTO = "auto"


def settings_of(
    task: QuestionTask,
    model: PreTrainedModel,
    chat: bool,
    length: int,
    answer: int,
    positions: str,
    cells: Sequence[Cell],
) -> Settings:
    """The settings of a run; refuses what the model cannot compute. Positions "auto" depend on its training length."""
    known = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions == AUTO:
        positions = COMPRESSED if known and length > known else ORIGINAL
    bounded = next((cell for cell in cells if cell.policy not in UNBOUNDED), None)
    if bounded:
        MultiStateRNN(model, **bounded.options, positions=positions)
    name = name_of(spacing(positions))
    return Settings(task.name, **model_key(model), chat=chat, length=length, positions=name, answer=answer)


def load_answers(task: QuestionTask, store: Store, cells: list[Cell], **wanted: Any) -> tuple[Answers, list[str]]:
    """The answers of the last settings with these values (None: any), and the questions that all cells answered."""
    positions = wanted.pop("positions", AUTO)
    wanted["positions"] = None if positions == AUTO else name_of(spacing(positions))
    given = {name: value for name, value in wanted.items() if value is not None}
    answers = Answers(store, Settings.last(store, task.name, **given))
    keys = answers.find_answered(cells)
    if not keys:
        missing = ", ".join(cell.label for cell in cells if not answers.find_answered([cell]))
        raise FileError(
            f"no question that all rows have answered ({missing} none)",
            store.path,
            advice="answer more, or use fewer rows",
        )
    return answers, keys


Assigned = dict[Cell, dict[str, Prompt]]  # the prompts that each cell answers, by key


def assign_prompts(
    builder: PromptBuilder, questions: Sequence[Question], answers: Answers, cells: Sequence[Cell]
) -> Assigned:
    """Each prompt once, however many cells of the table show its answer. Questions are stored with their prompts."""
    lengths = sorted({answers.length(cell) for cell in cells})
    # What set the length of a prompt: the settings, or the size of a truncated row.
    names = {length: "length" if length == answers.settings.length else "size" for length in lengths}
    assigned: Assigned = {}
    for question in questions:
        built = {length: builder.build(question, length, names[length]) for length in lengths}
        answers.store_question(question, built)
        by_key = {prompt.key: prompt for prompt in built.values()}
        for cell in cells:
            source, key = answers.source(cell, answers.questions[question.key])
            assigned.setdefault(source, {})[key] = by_key[key]
    answers.mark_used()
    return {cell: assigned[cell] for cell in sorted(assigned, key=lambda cell: cell.size is not None)}


class Understanding(Task[Cell, str, Record]):
    """One model on some prompts. An item is a prompt, by its key."""

    unit = "answers"
    gpu_batch, cpu_batch = 16, 8

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, prompts: Assigned, settings: Settings, metadata: Record
    ) -> None:
        self.key, self.metadata = settings.answer_key, {"length": settings.length, **metadata}
        self.tokenizer, self.prompts, self.settings = tokenizer, prompts, settings
        self.stop_tokens = stop_tokens_of(model, tokenizer)

    def cell_of(self, record: Record) -> Cell:
        return cell_of(record)

    def items(self, cell: Cell) -> list[str]:
        return list(self.prompts[cell])

    def record_key(self, cell: Cell) -> Record:
        return self.settings.answer_key_of(cell)

    def read(self, records: list[Record]) -> dict[str, Record]:
        return {record["prompt"]: record for record in records if "prediction" in record}

    def work(self, job: Job[Cell, str]) -> int:
        return sum(len(self.prompts[job.cell][key].ids) + self.settings.answer for key in job.items)

    def batches(self, job: Job[Cell, str]) -> list[list[str]]:
        """All at once: the engine keeps its batch filled, and reads a document once for all its questions."""
        return [job.items]

    def prepare(self, job: Job[Cell, str], model: PreTrainedModel) -> Compute[str]:
        ids = {key: self.prompts[job.cell][key].ids for key in job.items}
        rnn = self._rnn(job.cell, model, max(map(len, ids.values())) + self.settings.answer)
        backend = {"backend": backend_names(rnn)}
        params = SamplingParams(
            max_tokens=self.settings.answer,
            temperature=0,
            stop_token_ids=sorted(self.stop_tokens),
            ignore_eos=True,  # the stop tokens are all of them
        )

        def compute(keys: list[str], on_tokens: OnTokens) -> Iterator[Record]:
            prompts = [ids[key] for key in keys]
            for number, answer, seconds in answer_prompts(Engine.offline(rnn, job.batch), prompts, params, on_tokens):
                text = self.tokenizer.decode(answer, skip_special_tokens=True).strip()
                counts = {"tokens": len(prompts[number]), "answer_tokens": len(answer), "seconds": seconds}
                yield {"prompt": keys[number], "prediction": text, **counts, **backend}

        return compute

    def _rnn(self, cell: Cell, model: PreTrainedModel, tokens: int) -> MultiStateRNN:
        if cell.size is None:
            return full_model_rnn(model, tokens)
        return MultiStateRNN(model, **cell.options, positions=self.record_key(cell)["positions"])


def answer_questions(
    loaded: Loaded,
    task: QuestionTask,
    questions: Sequence[Question],
    answers: Answers,
    cells: Sequence[Cell],
    metadata: Record,
    batch: int | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> Answers:
    """Generate the answers that the store does not have, and read all of them."""
    builder = PromptBuilder(loaded.tokenizer, task.prompt, answers.settings.chat)
    prompts = assign_prompts(builder, questions, answers, cells)
    run = Runner(
        Understanding(loaded.model, loaded.tokenizer, prompts, answers.settings, metadata),
        answers.store,
        loaded.model,
        batch,
        workers,
    )
    run.run(list(prompts), progress or Progress())
    return Answers(answers.store, answers.settings)
