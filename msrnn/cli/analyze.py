from __future__ import annotations

import importlib.util
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.demo import manual
from msrnn.cli.eval.common import Batch, Length, Seed, check_counts, check_positions, quiet
from msrnn.cli.options import SMALL, Device, Dtype, Model
from msrnn.cli.results import drawn, stoppable
from msrnn.cli.tables import show_table, show_text
from msrnn.cli.terminal import note
from msrnn.cli.traced import studied
from msrnn.errors import UsageError
from msrnn.policy import Policy, is_full, resolve

if TYPE_CHECKING:
    from msrnn.analysis.study import Cell
    from msrnn.evaluation.data.chunks import Data
    from msrnn.evaluation.data.texts import Document

POLICIES, SIZES, CHUNKS = ("tova",), (512,), 31
MANUAL = "Python's own manual"

Text = Annotated[
    Path | None,
    Option(
        help="A folder of .txt files, one .txt file, or .jsonl lines with a text.",
        show_default=f"PG-19's test set, or {MANUAL}",
    ),
]
Policies = Annotated[
    list[str] | None, Option("--policy", help="Repeat to set policies side by side.", show_default="tova")
]
Sizes = Annotated[
    list[int] | None, Option("--size", help="States that each layer may hold; repeat for more.", show_default="512")
]
Paper = Annotated[bool, Option("--paper", help="tova at the paper's sizes: 256, 512, 1,024 and 2,048.")]
Books = Annotated[int, Option(help="Texts to take chunks of, at most.")]
ChunksPerBook = Annotated[int | None, Option(help="Of each text, at most.", show_default="what makes 31 in all")]
NltkData = Annotated[
    Path | None,
    Option(help="A folder with NLTK's data, for parts of speech.", show_default="where NLTK looks"),
]
TraceFolder = Annotated[
    Path | None, Option("--traces", help="Keep traces here, and take those that are.", show_default="OUT/traces")
]
Out = Annotated[Path, Option(help="Write analysis.md, the tables as .csv and the pictures here.")]


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
    """Which tokens stay: what each layer keeps of chunks of text, and for how long.

    The paper's analyses (tokens kept at each step, the share of them that is recent, steps kept by position and by part
    of speech), then lifetimes, the longest-lived tokens, and the agreement between policies, layers and heads. Each is
    a table and a picture, with its definition. Traces are kept, one file for each chunk, known by the model's weights,
    policy, size, dtype and tokens; what is there is not computed again, so a run that was stopped goes on.

    Examples:
        msrnn analyze --length 1024 --size 128
        msrnn analyze --text books/ --paper --nltk-data ~/nltk_data
        msrnn analyze --text book.txt --policy tova --policy h2o --size 256
    """
    cells = asked(policy, size, paper, length)
    check_counts(length=length, books=books, chunks_per_book=chunks_per_book, batch=batch)
    from msrnn.analysis.report import draw, summary, tables, write
    from msrnn.evaluation.data.chunks import Choice, choose
    from msrnn.evaluation.environment import environment
    from msrnn.hf.loading import check_dtype, device_named, load

    device_named(device)
    check_dtype(dtype)
    check_folders(out, traces)
    quiet()
    named, found = texts(text)
    tagger = tagger_of(nltk_data)
    decoder, tokenizer = load(model, device, dtype, on_convert=note)
    check_positions(decoder.config.get_text_config(decoder=True), length)
    each = chunks_per_book or -(-CHUNKS // min(books, len(found)))
    data = choose(found, tokenizer, Choice(length, books, each, seed))
    note(data.summary())
    told = {"model": model or SMALL, "text": named, "seed": str(seed), **environment(decoder.device)}
    tags = tags_of(tagger, data, found, tokenizer)
    with stoppable():
        made = studied(decoder, data, cells, traces or out / "traces", batch, told, tags)
    chunks = f"{len(data.chunks):,} chunks" if len(data.chunks) > 1 else "1 chunk"
    title = f"{told['model']}, {named}, {chunks} of {length:,} tokens"
    strings = partial(string_of, tokenizer)
    every, short = tables(made, strings), summary(made)
    show_table(f"{short.title}: {title}", short.header, short.strings())
    show_text(short.note)
    out.mkdir(parents=True, exist_ok=True)
    write(every, out, title, {"chunks": data.summary(), **told})
    kinds = drawn(lambda: draw(made, out, title, strings))
    show_text(f"All {len(every)} tables with their definitions: {out / 'analysis.md'}")
    note(f"written to {out}: analysis.md, and the tables as " + ", ".join(f".{kind}" for kind in ("csv", *kinds)))


def asked(policies: list[str] | None, sizes: list[int] | None, paper: bool, length: int) -> list[Cell]:
    if paper and (policies or sizes):
        raise UsageError("--paper: it has a policy and sizes of its own; give this, or --policy and --size")
    if paper:
        from msrnn.analysis.paper import SIZES as PAPER_SIZES

        sizes = list(PAPER_SIZES)
    names, sizes = policies or list(POLICIES), sorted(set(sizes or SIZES))
    for name, size in product(names, sizes):
        if is_full(name):
            raise UsageError("--policy full: it keeps every token, so there is nothing to analyze; name a bounded one")
        resolve(name, size)
    if sizes[-1] + 1 >= length:
        raise UsageError(
            f"--size {sizes[-1]}: chunks of {length:,} tokens show none of its choices; "
            "take a smaller size or longer chunks"
        )
    return list(product(dict.fromkeys(Policy.parse(name).name for name in names), sizes))


def check_folders(*folders: Path | None) -> None:
    for folder in folders:
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder}: a file; name a folder")


def texts(source: Path | None) -> tuple[str, list[Document]]:
    """What was asked for; or PG-19 where it can be had, and else the text of the demo."""
    from msrnn.evaluation.data.texts import PG19, Document, documents

    if source is not None:
        return source.resolve().name, documents(source)
    if importlib.util.find_spec("datasets") is not None:
        try:
            return PG19, documents(None)
        except ValueError as error:
            note(str(error))
    note(f"no PG-19 here: reading {MANUAL} instead; --text names another")
    return MANUAL, [Document("manual", manual)]


def tagger_of(folder: Path | None) -> Any:
    """None, with the reason, where NLTK or its data are not; refused where they were asked for."""
    from msrnn.analysis.words import Tagger

    try:
        return Tagger(folder)
    except ValueError as error:
        if folder is not None:
            raise
        note(f"no table of parts of speech: {error}")
        return None


def tags_of(tagger: Any, data: Data, found: list[Document], tokenizer: Any) -> list[list[str]] | None:
    from msrnn.analysis.passages import passages

    return tagger and [tagger.tags(passage) for passage in passages(data, found, tokenizer)]


def string_of(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))
