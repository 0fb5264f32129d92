from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.filesize import decimal
from typer import Argument, Option

from msrnn.cli.options import SMALL, Device, Dtype, Force, Model
from msrnn.cli.terminal import note
from msrnn.cli.text import check_target, read_text
from msrnn.cli.traced import traced_all
from msrnn.policy import FULL, policy, resolve

if TYPE_CHECKING:
    from msrnn.analyze.passages import Passage

POLICIES, MOST, LARGEST = ("tova", "h2o"), 4096, 512

Source = Annotated[str, Argument(metavar="TEXT|FILE", help="A text file, a text itself, or - for standard input.")]
Policies = Annotated[
    list[str] | None, Option("--policy", help="One, or two side by side.", show_default=", ".join(POLICIES))
]
Size = Annotated[
    int | None, Option(help="States that each layer may hold.", show_default="a quarter of the tokens, 512 at most")
]
Tokens = Annotated[int, Option(help="Tokens to read at most.")]
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
    from msrnn.analyze.explorer.page import LONGEST, page
    from msrnn.analyze.passages import passage
    from msrnn.cli.eval.common import quiet
    from msrnn.files import write_atomically
    from msrnn.models import load

    if tokens > LONGEST:
        raise ValueError(f"--tokens {tokens}: a page shows {LONGEST:,} at most")
    quiet()
    decoder, tokenizer = load(model, device, dtype, on_convert=note)
    read = passage(text, tokenizer, opening=True, tokens=tokens)
    states = bounded(size, len(read.ids))
    shown = traced_all(decoder, read.ids, names, states)
    about = f"{model or SMALL} · {name} · {len(read.ids):,} tokens · {len(shown[0].traced.layers)} layers"
    html = page(name, about, shown_pieces(read, tokenizer), shown)
    write_atomically(target, lambda path: _write(html, path))
    print(f"{target}: {about} ({decimal(target.stat().st_size)})")
    if open_ and not webbrowser.open(target.resolve().as_uri()):
        note("no browser to open it with; open the file in one")


def text_of(source: str) -> tuple[str, str]:
    """A name and the text: of a file where there is one by that name. Bytes that are no text are replaced."""
    if source == "-":
        return "text", read_text(source)
    if is_file(source):
        return Path(source).stem, read_text(source)
    text = source.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if not text.strip():
        raise ValueError("TEXT|FILE: empty; give a text or a file to read")
    if "\n" not in source and " " not in source.strip():
        raise ValueError(f"{source}: no such file; a text of one word shows nothing")
    return "text", text


def is_file(source: str) -> bool:
    try:
        return Path(source).is_file()
    except (OSError, ValueError):  # too long for a file's name, or with a null byte in it
        return False


def asked(policies: list[str] | None, size: int | None, tokens: int) -> list[str]:
    names = list(dict.fromkeys(policies or POLICIES))
    if len(names) > 2:
        raise ValueError(f"--policy {names[2]}: a page has room for two")
    for name in names:
        if name == FULL:
            raise ValueError("--policy full: it forgets nothing; name a bounded one")
        resolve(name, tokens if size is None else size)
    if tokens < 2:
        raise ValueError(f"--tokens {tokens}: must be 2 or more")
    return [policy(name).name for name in names]


def bounded(size: int | None, tokens: int) -> int:
    """The size asked for, or one that shows something."""
    states = min(LARGEST, max(2, tokens // 4)) if size is None else size
    if states + 1 >= tokens:
        raise ValueError(
            f"--size {states}: none of {tokens:,} tokens has to leave; take a smaller one or a longer text"
        )
    return states


def shown_pieces(read: Passage, tokenizer: Any) -> list[str]:
    """What each token adds to the text; those that stand for none of it by their own names."""
    named = (str(tokenizer.decode([token])) for token in read.ids)
    spans = zip(read.pieces, read.spans, named, strict=True)
    return [name if start == stop else piece for piece, (start, stop), name in spans]


def _write(html: str, path: Path) -> None:
    path.write_text(html, encoding="utf-8")
