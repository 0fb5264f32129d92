"""Conversations that last months: which questions about them does a bounded state still answer, with recall or not?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from msrnn.checks import check_count
from msrnn.core.rope import COMPRESSED, ORIGINAL, name_of, spacing
from msrnn.errors import UsageError
from msrnn.evaluation.api.common import Folder, check_positions, decoder_config, model_name, open_store, result_of
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.cells import check_lists, grid
from msrnn.evaluation.data.chat_prompts import ask_questions
from msrnn.evaluation.data.conversations import Conversation, limit_questions, load_conversations
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.tasks.chat_memory import CHECK, NAME, Case, ChatMemory
from msrnn.evaluation.tasks.chat_memory_report import Report
from msrnn.evaluation.tasks.chat_memory_scores import check_stemmer
from msrnn.policy import FULL, Policy
from msrnn.size import resolve

AUTO = "auto"


def chat_memory(
    model: PreTrainedModel,
    conversations: str | Path | Sequence[Conversation],
    policies: Sequence[str | Policy] = ("tova", FULL.name),
    sizes: Sequence[int] = (512,),
    *,
    tokenizer: Any,
    recall: int = 256,
    recall_every: int = 1,
    recall_while_reading: int | None = None,
    limit: int | None = None,
    chat: bool | None = None,
    positions: str = AUTO,
    max_new_tokens: int = 50,
    folder: Folder = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> EvaluationResult[Report]:
    """Measure how well questions about long conversations are answered, by category.

    Each conversation is read once into a state, and each question is asked from a copy of it, greedily. Scores are
    those of LoCoMo (Maharana et al., arXiv:2402.17753).

    conversations         a file in LoCoMo's JSON format, or what `load_conversations` read from one
    policies              policies or their names, or "full"
    sizes                 KV rows per layer
    recall                recalled rows of each KV head; each policy and size answers with and without them
    recall_every          tokens that share their recalled rows, in questions and answers
    recall_while_reading  the same while the conversation is read; None: it is read without recall
    limit                 questions to ask, at most, conversation by conversation; None: all
    chat                  use the chat template; None: if there is one
    positions             of kept tokens: original, compressed, compact; "auto": compressed beyond the training length
    max_new_tokens        tokens of an answer, at most
    folder                keep the records in FOLDER/chat-memory.jsonl, so that another call reuses them; None: nowhere
    about                 facts that are written into every record, such as the names of the `model` and the `file`
    """
    told = progress or Progress()
    check_stemmer()
    cases = chat_memory_cases(policies, sizes, recall, recall_every, recall_while_reading)
    check_questions(limit, max_new_tokens, positions)
    given = load_conversations(Path(conversations)) if isinstance(conversations, str | Path) else conversations
    chosen = limit_questions(given, limit)
    store = open_store(folder, NAME, CHECK)
    chat = bool(tokenizer.chat_template) if chat is None else chat
    told.note(f"making {sum(len(one.questions) for one in chosen):,} prompts")
    asked = [question for one in chosen for question in ask_questions(tokenizer, one, chat)]
    length = max(len(one.head) + len(one.tail) for one in asked) + max_new_tokens
    config = decoder_config(model)
    check_positions(config, length, told.note, "conversations")
    if positions == AUTO:
        known = getattr(config, "max_position_embeddings", None)
        positions = COMPRESSED if known and length > known else ORIGINAL
    positions = name_of(spacing(positions))
    if refusable := next((case for case in reversed(cases) if case.size is not None), None):
        refusable.rnn(model, positions)  # refuses what this model cannot do, before anything is computed
    source = {"model": model_name(model), **(about or {}), "chat": chat}
    metadata = {**source, **environment(model.device)}
    task = ChatMemory(model, tokenizer, asked, chat, max_new_tokens, positions, metadata)
    run = Runner(task, store, model, None, workers)
    results = run.results(cases, told)
    others = run.other_results(cases)
    report = Report({**results, **others}, [one.question.category for one in task.asked.values()])
    subject = "one conversation" if len(chosen) == 1 else f"{len(chosen):,} conversations"
    title = f"{source['model']}, {len(task.asked):,} questions about {subject}"
    return result_of(
        report,
        report.tables(title),
        run.facts,
        report.markdown(title, run.facts),
        None,
        run,
        cases,
        list(others),
    )


def chat_memory_cases(
    policies: Sequence[str | Policy],
    sizes: Sequence[int],
    recall: int,
    recall_every: int,
    recall_while_reading: int | None,
) -> list[Case]:
    """The full model if it is among the policies, each policy at each size, then the same with recall."""
    check_lists(policies, sizes)
    for name in policies:
        for size in sizes:
            resolve(name, size)
    check_count("recall", recall, least=0, of="KV rows")
    check_count("recall_every", recall_every, of="tokens")
    if recall_while_reading is not None:
        check_count("recall_while_reading", recall_while_reading, of="tokens")
        if not recall:
            raise UsageError(
                "no version recalls",
                name="recall_while_reading",
                value=recall_while_reading,
                advice="leave it out, or recall some rows",
            )
    cells = grid(policies, sizes, sys.maxsize).cells
    recalling = [cell for cell in cells if recall and cell.size is not None]
    return [
        *(Case(*cell) for cell in cells),
        *(Case(*cell, recall, recall_every, recall_while_reading) for cell in recalling),
    ]


def check_questions(limit: int | None, max_new_tokens: int, positions: str) -> None:
    """Refuse bad values before anything is computed."""
    if limit is not None:
        check_count("limit", limit)
    check_count("max_new_tokens", max_new_tokens)
    if positions != AUTO:
        spacing(positions)
