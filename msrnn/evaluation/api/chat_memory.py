"""Conversations that last months: which questions about them does a bounded state still answer, with recall or not?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from msrnn.checks import check_count
from msrnn.core.rope import COMPRESSED, ORIGINAL, name_of, spacing
from msrnn.evaluation.api.common import Folder, check_positions, decoder_config, model_name, open_store, result_of
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.cells import Cell, check_lists, check_row, grid
from msrnn.evaluation.data.chat_prompts import ask_questions
from msrnn.evaluation.data.conversations import Conversation, limit_questions, load_conversations
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.tasks.chat_memory import CHECK, NAME, ChatMemory, make_rnn
from msrnn.evaluation.tasks.chat_memory_report import Report
from msrnn.evaluation.tasks.chat_memory_scores import check_stemmer
from msrnn.policy import FULL, Policy

AUTO = "auto"


def chat_memory(
    model: PreTrainedModel,
    conversations: str | Path | Sequence[Conversation],
    policies: Sequence[str | Policy] = ("tova", "tova + 256 recalled", FULL.name),
    sizes: Sequence[int] = (512,),
    *,
    tokenizer: Any,
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

    conversations   a file in LoCoMo's JSON format, or what `load_conversations` read from one
    policies        policies or their names, or "full"; "tova + 256 recalled every 4, every 64 while reading" recalls
                    256 archived KV rows, once for 4 tokens of a question or an answer, and for 64 of a conversation
    sizes           KV rows per layer
    limit           questions to ask, at most, conversation by conversation; None: all
    chat            use the chat template; None: if there is one
    positions       of kept tokens: original, compressed, compact; "auto": compressed beyond the training length
    max_new_tokens  tokens of an answer, at most
    folder          keep the records in FOLDER/chat-memory.jsonl, so that another call reuses them; None: nowhere
    about           facts that are written into every record, such as the names of the `model` and the `file`
    """
    told = progress or Progress()
    check_stemmer()
    cells = chat_memory_cells(policies, sizes)
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
    for cell in cells:
        make_rnn(cell, model, positions)  # refuses what this model cannot do, before anything is computed
    source = {"model": model_name(model), **(about or {}), "chat": chat}
    metadata = {**source, **environment(model.device)}
    task = ChatMemory(model, tokenizer, asked, chat, max_new_tokens, positions, metadata)
    run = Runner(task, store, model, None, workers)
    results = run.results(cells, told)
    others = run.other_results(cells)
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
        cells,
        list(others),
    )


def chat_memory_cells(policies: Sequence[str | Policy], sizes: Sequence[int]) -> list[Cell]:
    """The full model if it is among the policies, then each policy at each size."""
    check_lists(policies, sizes)
    for name in policies:
        for size in sizes:
            check_row(name, size)
    return grid(policies, sizes, sys.maxsize).cells


def check_questions(limit: int | None, max_new_tokens: int, positions: str) -> None:
    """Refuse bad values before anything is computed."""
    if limit is not None:
        check_count("limit", limit)
    check_count("max_new_tokens", max_new_tokens)
    if positions != AUTO:
        spacing(positions)
