"""Shared parts of the functions: texts, the store of a folder, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from msrnn.checks import check_count
from msrnn.errors import UsageError
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.data.texts import Choice, Data, Document, choose
from msrnn.evaluation.report import Table
from msrnn.evaluation.runner import Runner
from msrnn.evaluation.store import Check, Record, Store
from msrnn.hf.rnn import MultiStateRNN

Text = str | Sequence[int] | Document  # a text, or its token ids
Texts = Sequence[Text] | Mapping[str, Text]  # with names, or numbered from 1 on
Folder = str | Path | Store | None
Note = Callable[[str], object]
R = TypeVar("R")


def open_store(folder: Folder, name: str, check: Check) -> Store:
    """NAME.jsonl in a folder, which is made where it is missing; without a folder, records in memory."""
    if folder is None:
        return Store(None)
    if isinstance(folder, Store):
        return folder
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise UsageError("a file", name="folder", value=str(folder), advice="give a folder")
    path.mkdir(parents=True, exist_ok=True)
    return Store(path / f"{name}.jsonl", check)


def documents_of(texts: Texts) -> list[Document]:
    """Texts by name. The name decides, with the seed, which chunks of a text are read."""
    if isinstance(texts, str):
        raise UsageError("one string", name="texts", advice="give a list of texts")
    named = texts.items() if isinstance(texts, Mapping) else ((str(i), text) for i, text in enumerate(texts, start=1))
    documents = [_document(name, text) for name, text in named]
    if not documents:
        raise UsageError("empty", name="texts", advice="give a text to read")
    return documents


def _document(name: str, text: Text) -> Document:
    if isinstance(text, Document):
        return text
    if isinstance(text, str):
        return Document(name, lambda: text)
    ids = [int(token) for token in text]
    return Document(name, lambda: "", lambda: ids)


def cut_chunks(model: PreTrainedModel, texts: Texts, tokenizer: Any, choice: Choice, note: Note) -> Data:
    """Cut texts into chunks of equal length, and take some; see `Choice`."""
    documents = documents_of(texts)
    if tokenizer is None and any(document.ids is None for document in documents):
        raise UsageError("texts are strings", name="tokenizer", advice="give a tokenizer, or token ids")
    check_count("length", choice.length)
    check_positions(decoder_config(model), choice.length, note)
    count = min(choice.books or len(documents), len(documents))
    note(f"cutting {count:,} of {len(documents):,} texts into chunks of {choice.length:,} tokens")
    data = choose(documents, tokenizer, choice)
    note(data.summary())
    return data


def decoder_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def check_positions(config: Any, length: int, note: Note, name: str = "length") -> None:
    """Refuse more tokens than a model has learned positions; with RoPE, only note it."""
    known = getattr(config, "max_position_embeddings", None)
    if not known or length <= known:
        return
    if not getattr(config, "rope_parameters", None):
        raise UsageError(f"this model has {known:,} positions", name=name, value=length, advice="use fewer tokens")
    note(f"{length:,} tokens are more than the {known:,} that this model was trained for")


def model_name(model: PreTrainedModel) -> str:
    if isinstance(model, MultiStateRNN):
        raise UsageError(
            "must be a model of transformers, which is bounded here", name="model", advice="give rnn.model"
        )
    return model.name_or_path or type(model).__name__


def result_of(
    report: R,
    tables: list[Table],
    facts: Record,
    page: str,
    draw: Callable[[Path], object] | None,
    run: Runner[Any, Any, Any],
    cells: Sequence[Any],
    others: Sequence[Any],
    label: Callable[[Any], str] = lambda cell: cell.label,
) -> EvaluationResult[R]:
    """A result with the records of its cells, and a word on what else the store has."""
    records = run.records([*cells, *others])
    shown = [label(one) for one in others]
    return EvaluationResult(report, tables, records, facts, page, draw, shown, run.other_records)
