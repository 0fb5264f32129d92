"""How commands run an evaluation: load its model, show its progress, and resume after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msrnn.cli.evaluation_options import EvaluationOptions
from msrnn.cli.terminal import note, progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.evaluation.data.texts import Document
    from msrnn.evaluation.runner import Progress
    from msrnn.evaluation.store import Check, Store

T = TypeVar("T")


class Loaded(NamedTuple):
    """A model, and the store of the folder."""

    store: Store
    model: PreTrainedModel
    tokenizer: Any
    about: dict[str, str]  # the names of the model and of what it reads


def load_model(options: EvaluationOptions, out: Path, name: str, check: Check, **about: str) -> Loaded:
    """Open the folder, and load the model. A damaged folder is refused before the model is loaded."""
    store = options.open_store(out, name, check)
    model, tokenizer = options.load()
    return Loaded(store, model, tokenizer, {"model": options.model_name, **about})


def load_texts(
    options: EvaluationOptions, out: Path, name: str, check: Check, text: Path | None
) -> tuple[Loaded, dict[str, Document]]:
    """Load texts and the model; bad input is refused before the model is loaded."""
    from msrnn.evaluation.data.texts import PG19, documents

    options.check()
    texts = {document.name: document for document in documents(text)}
    return load_model(options, out, name, check, text=text.resolve().name if text else PG19), texts


def evaluate_model(options: EvaluationOptions, loaded: Loaded, run: Callable[..., T]) -> T:
    """Run a function of `msrnn.evaluation` on a model; `run` has the arguments that not all of these functions have."""
    shared = {"tokenizer": loaded.tokenizer, "folder": loaded.store, "about": loaded.about, "workers": options.workers}
    return evaluate(options, lambda callbacks: run(loaded.model, **shared, progress=callbacks))


def evaluate(options: EvaluationOptions, run: Callable[[Progress], T]) -> T:
    """Run an evaluation with a progress bar. Ctrl-C prints how to resume; a cluster is left at the end."""
    try:
        with stoppable(options.force), show_progress() as callbacks:
            return run(callbacks)
    finally:
        if options.workers is not None:
            options.workers.close()


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Callbacks that show a bar: the tokens that are left, and the cell that is computed."""
    from msrnn.evaluation.runner import Progress

    bar, cells = progress(), list[Any]()
    task = bar.add_task("", total=None)

    def on_cell(cell: Any) -> None:
        label = f"{cell.label} ({cells.index(cell) + 1} of {len(cells)})" if cell in cells else cell.label
        bar.update(task, description=label)
        if bar.disable:
            note(label)

    def on_total(tokens: int) -> None:
        bar.reset(task, total=tokens)
        bar.start()
        if not tokens:
            note("nothing left to compute")

    try:
        yield Progress(on_total, on_cell, partial(bar.advance, task), note_resumed, note, cells.extend)
    finally:
        bar.stop()


@contextmanager
def stoppable(force: bool = False, kept: bool = True) -> Iterator[None]:
    """On Ctrl-C, print how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        if not kept:
            note("stopped; without --out nothing is kept")
        elif force:
            note(
                "stopped; what was computed is kept. Run the same command without --force to use it with older records"
            )
        else:
            note("stopped; run the same command to continue")
        raise


def note_resumed(done: int, total: int, what: str) -> None:
    if done:
        note(f"{done:,} of {total:,} {what} already done")
