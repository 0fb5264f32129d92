"""What evaluating commands share: options and checks, progress, and the folder of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from typer import Option

from msrnn.cli.options import Cpus, Device, Dtype, Model, Ray
from msrnn.cli.terminal import note, progress, show_table
from msrnn.core.ray_cluster import check_cpus
from msrnn.core.torchrun import is_first, is_torchrun
from msrnn.errors import UsageError
from msrnn.hf.model_options import SMALL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.evaluation.api.result import EvaluationResult
    from msrnn.evaluation.data.texts import Document
    from msrnn.evaluation.ray_workers import RayWorkers
    from msrnn.evaluation.report import Table
    from msrnn.evaluation.runner import Progress
    from msrnn.evaluation.store import Check, Store
    from msrnn.hf.loading import Loaded as LoadedModel

T = TypeVar("T")
TOVA = "tova"

Text = Annotated[
    Path | None,
    Option(
        help="A folder of .txt files, one .txt file, .jsonl lines with a text, or .npy files of token ids.",
        show_default="PG-19's test set",
    ),
]
Length = Annotated[
    int, Option(help="Tokens of a chunk, including the token that opens a text, if the tokenizer adds one.")
]
Books = Annotated[int | None, Option(help="Number of texts to take chunks from.", show_default="all")]
ChunksPerBook = Annotated[int, Option(help="Most chunks to take from each text.")]
Seed = Annotated[int, Option(help="Random seed that selects texts and chunks.")]
Batch = Annotated[int | None, Option(help="Chunks read at once.", show_default="1 on cpu, 64 or what fits on cuda")]
Against = Annotated[
    str | None, Option(help="The policy that the others are compared with.", show_default="tova, or the first")
]
Chat = Annotated[
    bool | None,
    Option("--chat/--no-chat", help="Use the chat template, or the bare text.", show_default="chat if there is one"),
]
Recompute = Annotated[
    bool,
    Option("--force", help="Compute these results again, even if the folder has them; its other records are kept."),
]
SkipDamaged = Annotated[
    bool, Option("--skip-damaged", help="Move damaged lines of the folder's .jsonl to another file, and continue.")
]
MAX_BATCH = 2**16  # more fit into no memory


@dataclass(frozen=True)
class EvaluationOptions:
    """The group of options of every evaluation: its model, and what to do with the records of the folder."""

    model: Model = None
    device: Device = "auto"
    dtype: Dtype = None
    force: Recompute = False
    skip_damaged: SkipDamaged = False
    ray: Ray = None
    cpus: Cpus = None

    @property
    def model_name(self) -> str:
        return self.model or SMALL

    def check(self) -> None:
        """Refuse a bad device or dtype before anything is loaded; silence other libraries."""
        from msrnn.hf.loading import check_dtype, device_named

        check_cpus(self.ray, self.cpus)
        if self.ray is not None and is_torchrun():
            raise UsageError(
                "--ray: workers load whole models, which torchrun's processes share; leave one of them out"
            )
        if self.ray is None:
            device_named(self.device)
        check_dtype(self.dtype)
        quiet()

    @cached_property
    def workers(self) -> RayWorkers | None:
        """The cluster that computes; None: this process does."""
        if self.ray is None:
            return None
        from msrnn.core.ray_cluster import Cluster
        from msrnn.evaluation.ray_workers import RayWorkers

        cluster = Cluster(self.ray, self.device, self.cpus)
        note(cluster.summary())
        return RayWorkers(cluster, self.model, self.dtype)

    def load(self) -> LoadedModel:
        """The model and its tokenizer. If others compute, its weights are only identified here, on the CPU."""
        from msrnn.hf.loading import load

        if self.workers is None:
            return load(self.model, self.device, self.dtype, on_convert=note, shared=is_torchrun())
        return load(self.model, "cpu", self.workers.dtype, on_convert=note)

    def open_store(self, folder: Path, name: str, check: Check) -> Store:
        return open_store(folder, name, check, force=self.force, skip_damaged=self.skip_damaged)


class Loaded(NamedTuple):
    """A model, the texts that it reads, and the store of the folder."""

    store: Store
    model: PreTrainedModel
    tokenizer: Any
    texts: dict[str, Document]
    about: dict[str, Any]  # the names of model and text


def load_texts(options: EvaluationOptions, out: Path, name: str, check: Check, text: Path | None) -> Loaded:
    """Open the folder, and load the texts and the model; bad input is refused before the model is loaded."""
    from msrnn.evaluation.data.texts import PG19, documents

    options.check()
    texts = {document.name: document for document in documents(text)}
    store = options.open_store(out, name, check)
    model, tokenizer = options.load()
    about = {"model": options.model_name, "text": text.resolve().name if text else PG19}
    return Loaded(store, model, tokenizer, texts, about)


def check_against(against: str | None, policies: Sequence[str]) -> str:
    """The policy that the others are compared with."""
    from msrnn.evaluation.cells import reference_policy

    try:
        return reference_policy(against, policies)
    except UsageError as error:
        if error.name != "against":
            raise
        raise UsageError(f"--against {against}: {error.message}; add --policy {against}") from error


def check_counts(length: int, **counts: int | None) -> None:
    if length < 2:
        raise UsageError(f"--length {length}: must be 2 or more, since the first token is given")
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    check_batch(batch=counts.get("batch"))


def check_batch(**batches: int | None) -> None:
    for name, value in batches.items():
        if value is not None and not 1 <= value <= MAX_BATCH:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be from 1 to {MAX_BATCH:,}")


def quiet() -> None:
    """Silence warnings of transformers about long texts, and of the hub about retries."""
    import huggingface_hub
    import transformers

    loggers: tuple[Any, Any] = transformers.logging, huggingface_hub.logging
    for logger in loggers:
        logger.set_verbosity_error()


def check_positions(config: Any, length: int, option: str = "--length") -> None:
    """Refuse more tokens than a model has learned positions; with RoPE, only print a note."""
    from msrnn.evaluation.api import common

    try:
        common.check_positions(config, length, note)
    except UsageError as error:
        raise UsageError(f"{option} {length}: {error.problem}") from error


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


def evaluate(options: EvaluationOptions, run: Callable[[Progress], T]) -> T:
    """Run an evaluation with a progress bar. Ctrl-C prints how to resume; a cluster is left at the end."""
    try:
        with stoppable(options.force), show_progress() as callbacks:
            return run(callbacks)
    finally:
        if options.workers is not None:
            options.workers.close()


def report(result: EvaluationResult[Any], folder: Path) -> None:
    """Print the tables, and write them and the figure."""
    note_other_records(result.others, result.left_out)
    show_tables(result.tables)
    write_report(folder, result.table, result.page, partial(result.draw, folder) if result.draw else None)


def open_store(folder: Path, name: str, check: Check, *, force: bool, skip_damaged: bool) -> Store:
    """NAME.jsonl in a folder, which is made where it is missing; with `force` its records count as not computed."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder}: a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return read_store(folder / f"{name}.jsonl", check, force=force, skip_damaged=skip_damaged)


def read_store(path: Path, check: Check, *, force: bool = False, skip_damaged: bool) -> Store:
    """The records of a file; an error about damaged lines names the option that skips them."""
    from msrnn.evaluation.store import DamagedRecordsError, Store

    try:
        return Store(path, check, redo=force, skip_damaged=skip_damaged, writes=is_first())
    except DamagedRecordsError as error:
        raise UsageError(f"{error}: add --skip-damaged") from error


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


def note_other_records(labels: Sequence[str], left_out: int) -> None:
    """Note what else the folder has: cells that the tables show as well, and the number of records they do not."""
    if labels:
        note(f"the tables also show {', '.join(labels)}, from earlier commands")
    if left_out:
        note(f"{left_out:,} records of other models, dtypes or data are in the folder, but not in these tables")


def show_tables(tables: Sequence[Table]) -> None:
    for table in tables:
        show_table(table.title, table.header, table.strings())


def write_report(folder: Path, table: Table, page: str, draw: Callable[[], object] | None = None) -> None:
    """NAME.md, NAME.csv where the table has lines for it, and the figures that `draw` draws."""
    if not is_first():
        return
    kinds = ["jsonl", "md"]
    (folder / f"{table.name}.md").write_text(page)
    if table.lines:
        (folder / f"{table.name}.csv").write_text(table.csv())
        kinds.append("csv")
    if draw:
        kinds += draw_if_possible(draw)
    note(f"written to {folder}: " + ", ".join(f"{table.name}.{kind}" for kind in kinds))


def draw_if_possible(draw: Callable[[], object]) -> tuple[str, ...]:
    """Draw figures; the kinds of their files, none without matplotlib."""
    from msrnn.evaluation import report

    if not report.has_matplotlib():
        note("no figures: matplotlib is not installed; pip install 'msrnn[plots]' then run the same command again")
        return ()
    draw()
    return ("png", "svg")
