from __future__ import annotations

import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.filesize import decimal
from typer import Argument, Option

from msrnn.cli.options import SMALL, Device, Dtype, Force, Model
from msrnn.cli.terminal import note
from msrnn.cli.text import check_target, read_text
from msrnn.cli.traced import traced_all
from msrnn.errors import UsageError
from msrnn.policy import Policy, is_full, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from msrnn.analysis.passages import Passage

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase, str]  # and the model's name

POLICIES, MOST, LARGEST = ("tova", "h2o"), 4096, 512
FEWEST = 3  # tokens: a state of size 1 sees two of them and then evicts

Source = Annotated[str, Argument(metavar="TEXT|FILE", help="A text file, a text itself, or - for standard input.")]
Policies = Annotated[
    list[str] | None, Option("--policy", help="One, or two side by side.", show_default=", ".join(POLICIES))
]
Size = Annotated[
    int | None, Option(help="States that each layer may hold.", show_default="a quarter of the tokens, 512 at most")
]
Tokens = Annotated[int, Option(help="Read this many tokens at most.")]
Out = Annotated[Path | None, Option(help="Write the page here.", show_default="NAME.html")]
Open = Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")]


def explore(
    source: Source,
    policy: Policies = None,
    size: Size = None,
    tokens: Tokens = MOST,
    out: Out = None,
    force: Force = False,
    open_: Open = True,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """A page to see what a bounded model remembers of a text, token by token and layer by layer.

    Every token is shaded by how long it is kept; sliders for step, layer and head show what is still remembered at any
    moment. One file of HTML, which needs no server and no network, and shows any text as text.

    Examples:
        msrnn explore book.txt
        msrnn explore book.txt --policy tova --policy window+4 --size 256
        fortune -l | msrnn explore - --out fortune.html --no-open
    """
    name, text = text_of(source)
    target = out or Path(f"{name}.html")
    names = asked(policy, size, tokens)
    check_target(target, force)
    try:
        about = write_page(target, name, text, names, size, tokens, partial(loaded, model, device, dtype))
    except KeyboardInterrupt:
        note(f"\nstopped: {target} was not written; run the same command to start again (fewer --tokens are faster)")
        raise
    print(f"{target}: {about} ({decimal(target.stat().st_size)})")
    if open_ and not webbrowser.open(target.resolve().as_uri()):
        note("no browser to open it with; open the file in one")


def write_page(
    target: Path, name: str, text: str, policies: list[str], size: int | None, tokens: int, load: Callable[[], Loaded]
) -> str:
    """Trace the first tokens of the text under each policy and write the page; one line about it."""
    from msrnn.analysis.explorer.page import LONGEST, page
    from msrnn.analysis.passages import passage
    from msrnn.core.state_file import write_atomically

    if tokens > LONGEST:
        raise UsageError(f"--tokens {tokens}: a page shows {LONGEST:,} at most")
    model, tokenizer, called = load()
    read = passage(text, tokenizer, opening=True, tokens=tokens)
    shown = traced_all(model, read.ids, policies, bounded(size, len(read.ids), policies))
    about = f"{called} · {name} · {len(read.ids):,} tokens · {len(shown[0].traced.layers)} layers"
    html = page(name, about, shown_pieces(read, tokenizer), shown)
    write_atomically(target, lambda path: _write(html, path))
    return about


def loaded(name: str | None, device: str, dtype: str | None) -> Loaded:
    from msrnn.cli.eval.common import quiet
    from msrnn.hf.loading import load

    quiet()
    called = name or SMALL
    note(f"loading {called}")
    return (*load(name, device, dtype, on_convert=note), called)


def text_of(source: str) -> tuple[str, str]:
    """A name and the text: of a file where there is one by that name. Bytes that are no text are replaced."""
    if source == "-":
        return "text", read_text(source)
    if path := existing(source):
        if path.is_dir():
            example = next((f", such as {file}" for file in sorted(path.glob("*.txt"))), "")
            raise UsageError(f"{path}: a folder; name a text file in it{example}")
        return path.stem, read_text(source)
    text = source.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if not text.strip():
        raise UsageError("TEXT|FILE: empty; give a text or a file to read")
    if "\n" not in source and source.endswith((".txt", ".md")):
        raise UsageError(f"{source}: no such file")
    if "\n" not in source and " " not in source.strip():
        raise UsageError(f"{source}: no such file; a text of one word shows nothing")
    return "text", text


def existing(source: str) -> Path | None:
    """The file, pipe or folder of this name."""
    path = Path(source)
    try:
        return path if source and path.exists() else None
    except (OSError, ValueError):  # too long for a file's name, or with a null byte in it
        return None


def asked(policies: list[str] | None, size: int | None, tokens: int) -> list[str]:
    """The policies by name. What can be refused before a model is loaded is refused here."""
    if tokens < FEWEST:
        raise UsageError(f"--tokens {tokens}: must be at least {FEWEST}; fewer fit into every size")
    names = list(dict.fromkeys(policies or POLICIES))
    if len(names) > 2:
        raise UsageError(f"--policy {names[2]}: a page has room for two")
    for name in names:
        if is_full(name):
            raise UsageError("--policy full: it evicts nothing; name a bounded policy")
        if size is None:
            check_default(name, default_size(tokens), f"at most {default_size(tokens)}")
        else:
            resolve(name, size)
    return [Policy.parse(name).name for name in names]


def default_size(tokens: int) -> int:
    return min(LARGEST, max(2, tokens // 4))


def check_default(name: str, size: int, described: str) -> None:
    """Whether the policy takes the default size, which the user did not give and so cannot be blamed for."""
    chosen = Policy.parse(name)
    try:
        resolve(chosen, size)
    except ValueError as error:
        raise UsageError(f"--policy {name} at the default --size of {described}: {error}; give --size") from error


def bounded(size: int | None, tokens: int, policies: list[str]) -> int:
    """The size asked for, or a quarter of the tokens; it must evict something."""
    states = default_size(tokens) if size is None else size
    if states + 1 >= tokens:
        if size is None:
            mend = "give a longer text, more --tokens or --size 1"
            raise UsageError(f"{tokens:,} tokens: the default --size of {states} evicts none of them; {mend}")
        raise UsageError(
            f"--size {states}: none of {tokens:,} tokens has to leave; take a smaller one or a longer text"
        )
    if size is None:
        for name in policies:
            check_default(name, states, f"{states}, a quarter of {tokens:,} tokens")
    return states


def shown_pieces(read: Passage, tokenizer: Any) -> list[str]:
    """What each token adds to the text; a special token, which adds nothing, by its name."""
    named = (str(tokenizer.decode([token])) for token in read.ids)
    spans = zip(read.pieces, read.spans, named, strict=True)
    return [name if start == stop else piece for piece, (start, stop), name in spans]


def _write(html: str, path: Path) -> None:
    path.write_text(html, encoding="utf-8")
