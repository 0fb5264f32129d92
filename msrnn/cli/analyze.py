from __future__ import annotations

import importlib.util
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.evaluation import note_resumed, stoppable
from msrnn.cli.evaluation_checks import check_counts, check_length, check_positions
from msrnn.cli.files import MANUAL, manual
from msrnn.cli.options import Device, Dtype, Model
from msrnn.cli.results_folder import draw_if_possible
from msrnn.cli.terminal import note, progress, quiet, show_table, show_text
from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import check_source
from msrnn.hf.model_options import SMALL
from msrnn.size import parse_policy, refuse_budget, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.analysis.study import Cell, Study
    from msrnn.analysis.tagging import Tagger
    from msrnn.evaluation.data.texts import Data, Document

POLICIES, SIZES, CHUNKS = ("tova",), (512,), 31

Text = Annotated[
    Path | None,
    Option(
        help="Texts: a folder of .txt files, a .txt file, or a .jsonl file with a text on each line.",
        show_default=f"PG-19's test set, or {MANUAL}",
    ),
]
Policies = Annotated[
    list[str] | None, Option("--policy", help="Eviction policy; repeat to compare several.", show_default="tova")
]
Sizes = Annotated[
    list[int] | None,
    Option(
        "--size",
        help="Most KV rows that each layer keeps (one per token); repeat to compare several.",
        show_default="512",
    ),
]
Paper = Annotated[bool, Option("--paper", help="Policy tova at the paper's sizes: 256, 512, 1,024 and 2,048.")]
Length = Annotated[int, Option(help="Tokens of a chunk, including the token that opens a text.")]
Seed = Annotated[int, Option(help="Random seed that selects texts and chunks.")]
Batch = Annotated[int | None, Option(help="Chunks read at once.", show_default="1 on cpu, 8 on cuda")]
Books = Annotated[int, Option(help="Most texts to take chunks from.")]
ChunksPerBook = Annotated[
    int | None, Option(help="Most chunks to take from each text.", show_default="enough for 31 in all")
]
NltkData = Annotated[
    Path | None,
    Option(help="Folder with NLTK's data, for parts of speech.", show_default="the folders that NLTK searches"),
]
TraceFolder = Annotated[
    Path | None, Option("--traces", help="Folder of traces: read, and extended.", show_default="OUT/traces")
]
Out = Annotated[Path, Option(help="Folder for analysis.md, the tables as .csv and the figures.")]


def analyze(
    text: Text = None,
    policy: Policies = None,
    size: Sizes = None,
    paper: Paper = False,
    length: Length = 4096,
    books: Books = CHUNKS,
    chunks_per_book: ChunksPerBook = None,
    seed: Seed = 0,
    batch: Batch = None,
    nltk_data: NltkData = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = None,
    traces: TraceFolder = None,
    out: Out = Path("results/analyze"),
) -> None:
    """Measure which tokens each layer keeps of chunks of text, and for how long.

    First the paper's analyses: tokens kept at each step, the share of recent tokens, steps kept by position and by part
    of speech. Then lifetimes, the longest-lived tokens, and the agreement between policies, layers and heads. Each is a
    table and a figure, with its definition.

    A trace (the eviction times of one chunk) is stored in a file, identified by the model's weights, policy, size,
    dtype and tokens. Stored traces are not computed again, so the same command continues a run that was stopped.

    Examples:
        msrnn analyze --length 1024 --size 128
        msrnn analyze --text books/ --paper --nltk-data ~/nltk_data
        msrnn analyze --text book.txt --policy tova --policy h2o --size 256
    """
    if text is not None:
        check_source(text)
    cells = check_cells(policy, size, paper, length)
    check_length(length)
    check_counts(books=books, chunks_per_book=chunks_per_book, batch=batch)
    from msrnn.analysis.figures import draw_figures
    from msrnn.analysis.tables import make_tables, summary_table, write_tables
    from msrnn.analysis.tagging import passages
    from msrnn.evaluation.data.texts import Choice, choose
    from msrnn.evaluation.environment import environment
    from msrnn.hf.loading import check_dtype, device_named, load

    device_named(device)
    check_dtype(dtype)
    check_folder("--out", out)
    check_folder("--traces", traces)
    quiet()
    text_name, texts = find_texts(text)
    tagger = load_tagger(nltk_data)
    decoder, tokenizer = load(model, device, dtype, on_convert=note)
    check_positions(decoder.config.get_text_config(decoder=True), length)
    each = chunks_per_book or -(-CHUNKS // min(books, len(texts)))
    data = choose(texts, tokenizer, Choice(length, books, each, seed))
    note(data.summary())
    facts = {"model": model or SMALL, "text": text_name, "seed": str(seed), **environment(decoder.device)}
    tags = [tagger.tags(passage) for passage in passages(data, texts, tokenizer)] if tagger else None
    with stoppable():
        study = run_with_progress(decoder, data, cells, traces or out / "traces", batch, facts, tags)
    chunks = f"{len(data.chunks):,} chunks" if len(data.chunks) > 1 else "1 chunk"
    title = f"{facts['model']}, {text_name}, {chunks} of {length:,} tokens"
    strings = partial(token_string, tokenizer)
    all_tables, short = make_tables(study, strings), summary_table(study)
    show_table(f"{short.title}: {title}", short.header, short.strings())
    show_text(short.note)
    out.mkdir(parents=True, exist_ok=True)
    write_tables(all_tables, out, title, {"chunks": data.summary(), **facts})
    kinds = draw_if_possible(lambda: draw_figures(study, out, title, strings))
    show_text(f"All {len(all_tables)} tables with their definitions: {out / 'analysis.md'}")
    note(f"written to {out}: analysis.md, and the tables as " + ", ".join(f".{kind}" for kind in ("csv", *kinds)))


def check_cells(policies: list[str] | None, sizes: list[int] | None, paper: bool, length: int) -> list[Cell]:
    """The policies and sizes to trace. Bad values are refused before a model is loaded."""
    if paper and (policies or sizes):
        raise UsageError("--paper: sets the policy and the sizes; leave out --policy and --size, or --paper")
    if paper:
        from msrnn.analysis.study import PAPER_SIZES

        sizes = list(PAPER_SIZES)
    names, sizes = policies or list(POLICIES), sorted(set(sizes or SIZES))
    chosen: dict[str, None] = {}
    for name in names:
        policy, budget = parse_policy(name)
        if not policy.evicts:
            raise UsageError("--policy full: evicts nothing, so there is nothing to analyze; name a bounded policy")
        refuse_budget(budget, "the analyses compare layers of one size")
        for size in sizes:
            resolve(policy, size)
        chosen[policy.name] = None
    if sizes[-1] + 1 >= length:
        raise UsageError(
            f"--size {sizes[-1]}: evicts too little of a chunk of {length:,} tokens to compare policies; "
            "use a smaller --size or a larger --length"
        )
    return list(product(chosen, sizes))


def check_folder(option: str, folder: Path | None) -> None:
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UsageError(f"{option} {folder}: a file; name a folder")


def find_texts(source: Path | None) -> tuple[str, list[Document]]:
    """A name and the texts: those given, or PG-19 if it can be downloaded, or Python's manual."""
    from msrnn.evaluation.data.texts import PG19, Document, documents

    if source is not None:
        return source.resolve().name, documents(source)
    if importlib.util.find_spec("datasets") is not None:
        try:
            return PG19, documents(None)
        except UsageError as error:
            note(str(error))
    note(f"PG-19 is not available: reading {MANUAL} instead; --text names another text")
    return MANUAL, [Document("manual", manual)]


def load_tagger(folder: Path | None) -> Tagger | None:
    """The part-of-speech tagger. If --nltk-data is not given and NLTK is missing, None, with a remark."""
    from msrnn.analysis.tagging import Tagger

    try:
        return Tagger(folder)
    except UsageError as error:
        if folder is not None:
            raise UsageError(f"--nltk-data {folder}: {error}") from error
        note(f"no table of parts of speech: {error}; --nltk-data FOLDER names its folder")
        return None


def run_with_progress(
    model: PreTrainedModel,
    data: Data,
    cells: list[Cell],
    folder: Path,
    batch: int | None,
    environment: dict[str, str],
    tags: list[list[str]] | None,
) -> Study:
    """Run the study, with a bar that counts the tokens still to read."""
    import numpy

    from msrnn.analysis.study import StudyProgress, run_study

    ids = numpy.array([chunk.ids for chunk in data.chunks])
    batch = batch or (8 if model.device.type == "cuda" else 1)
    with progress() as bar:
        task = bar.add_task("", total=None)

        def on_start(done: int, total: int) -> None:
            note_resumed(done, total, "traces")
            if done == total:
                note("nothing left to trace")
            bar.update(task, total=(total - done) * data.length)

        def on_cell(label: str) -> None:
            bar.update(task, description=label)
            if bar.disable:
                note(label)

        callbacks = StudyProgress(on_start, on_cell, partial(bar.advance, task))
        return run_study(model, ids, cells, folder, batch, environment, tags, callbacks)


def token_string(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))
