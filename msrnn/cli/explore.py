from __future__ import annotations

import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rich.filesize import decimal
from typer import Argument, Option

from msrnn.checks import check_count
from msrnn.cli.files import check_target, text_or_file
from msrnn.cli.options import Device, Dtype, Force, Model
from msrnn.cli.terminal import note, progress
from msrnn.errors import UsageError
from msrnn.hf.model_options import SMALL, ModelOptions
from msrnn.policy import Policy
from msrnn.recall import Recall
from msrnn.size import parse_policy, refuse_budget, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from msrnn.analysis.explorer import PolicyTrace

POLICIES, DEFAULT_TOKENS, LARGEST_DEFAULT_SIZE = ("tova", "h2o"), 4096, 512
EVERY = 16  # tokens that recall together
LEAST_TOKENS = 3  # even at size 1, two tokens are seen before one is evicted

Source = Annotated[str, Argument(metavar="TEXT|FILE", help="A text file, a text, or - for standard input.")]
Policies = Annotated[
    list[str] | None,
    Option("--policy", help="Eviction policy; give it twice to compare two.", show_default=", ".join(POLICIES)),
]
Size = Annotated[
    int | None,
    Option(
        help="Most KV rows that each layer keeps (one per token).",
        show_default="a quarter of the tokens read, at most 512",
    ),
]
Tokens = Annotated[int, Option(help="Most tokens of the text to read.")]
Protect = Annotated[int, Option(help="Tokens at the beginning of the text that are never evicted; underlined.")]
Recalled = Annotated[
    int, Option("--recall", help="KV rows that each token recalls from an archive of all tokens, outlined; 0: none.")
]
RecalledEvery = Annotated[int, Option(help="With --recall: tokens that share their recalled rows.")]
Out = Annotated[Path | None, Option(help="File to write the page to.", show_default="NAME.html")]
Open = Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")]


class Shown(NamedTuple):
    """What the page shows besides evictions."""

    protect: int = 0  # tokens at the beginning that are not evicted
    recall: Recall | None = None


def explore(
    source: Source,
    policy: Policies = None,
    size: Size = None,
    tokens: Tokens = DEFAULT_TOKENS,
    protect: Protect = 0,
    recall: Recalled = 0,
    recall_every: RecalledEvery = EVERY,
    out: Out = None,
    force: Force = False,
    open_: Open = True,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Write a web page that shows which tokens of a text each layer keeps, and for how long.

    Each token is shaded by how long it is kept. Sliders for step, layer and head show which tokens are still kept at
    any step. The page is one HTML file, which needs no server and no network.

    Examples:
        msrnn explore book.txt
        msrnn explore book.txt --policy tova --policy window+4 --size 256
        msrnn explore question_and_book.txt --protect 40
        msrnn explore book.txt --policy tova --recall 64
        fortune -l | msrnn explore - --out fortune.html --no-open
    """
    name, text = text_or_file(source)
    target = out or Path(f"{name}.html")
    chosen = check_policies(policy, size, tokens)
    check_count("protect", protect, least=0, of="tokens")
    ModelOptions(recall=recall, recall_every=recall_every if recall or recall_every != EVERY else 1)
    how = Shown(protect, Recall(recall, recall_every) if recall else None)
    check_target(target, force)
    try:
        about = write_page(target, name, text, chosen, size, tokens, how, partial(load_model, model, device, dtype))
    except KeyboardInterrupt:
        note(f"\nstopped: {target} was not written; run the same command to start again (fewer --tokens are faster)")
        raise
    print(f"{target}: {about} ({decimal(target.stat().st_size)})")
    if open_ and not webbrowser.open(target.resolve().as_uri()):
        note(f"no browser was found; open {target} in one")


def write_page(
    target: Path,
    name: str,
    text: str,
    policies: list[Policy],
    size: int | None,
    tokens: int,
    how: Shown,
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase, str]],
) -> str:
    """Trace the first tokens of the text under each policy and write the page; returns one line about it."""
    from msrnn.analysis.explorer import MOST_TOKENS, page, token_texts
    from msrnn.analysis.tagging import passage
    from msrnn.core.atomic import write_atomically

    if tokens > MOST_TOKENS:
        raise UsageError(f"--tokens {tokens}: must be at most {MOST_TOKENS:,}, the most that a page can show")
    model, tokenizer, model_name = load()
    read = passage(text, tokenizer, add_special_tokens=True, tokens=tokens)
    traces = trace_with_progress(model, read.ids, policies, check_size(size, len(read.ids), policies), how)
    about = f"{model_name} · {name} · {len(read.ids):,} tokens · {len(traces[0].trace.layers)} layers"
    html = page(
        name, about, token_texts(read, tokenizer), traces, how.protect, how.recall.every if how.recall else None
    )

    def write(path: Path) -> None:
        path.write_text(html, encoding="utf-8")

    write_atomically(target, write)
    return about


def trace_with_progress(
    model: PreTrainedModel, ids: list[int], policies: list[Policy], size: int, how: Shown
) -> list[PolicyTrace]:
    from msrnn.analysis.explorer import trace_policies

    with progress() as bar:

        def on_policy(name: str) -> Callable[[int], object]:
            if bar.disable:
                note(f"reading {len(ids):,} tokens under {name}")
            return partial(bar.advance, bar.add_task(f"reading under {name}", total=len(ids)))

        try:
            return trace_policies(model, ids, policies, size, on_policy, *how)
        except UsageError as error:
            if error.name != "protect":
                raise
            advice = "protect fewer tokens, or use a larger --size"
            raise UsageError(error.message, name="protect", value=how.protect, advice=advice) from error


def load_model(
    name: str | None, device: str, dtype: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """The model, its tokenizer and its name."""
    from msrnn.cli.terminal import quiet
    from msrnn.hf.loading import load

    quiet()
    shown_name = name or SMALL
    note(f"loading {shown_name}")
    return (*load(name, device, dtype, on_convert=note), shown_name)


def check_policies(policies: list[str] | None, size: int | None, tokens: int) -> list[Policy]:
    """The policies. Bad values are refused before a model is loaded."""
    if tokens < LEAST_TOKENS:
        raise UsageError(f"--tokens {tokens}: must be at least {LEAST_TOKENS}; no size evicts any of fewer tokens")
    names = list(dict.fromkeys(policies or POLICIES))
    if len(names) > 2:
        raise UsageError(f"--policy {names[2]}: a page shows at most two policies; leave one out")
    chosen = []
    for name in names:
        policy, budget = parse_policy(name)
        if not policy.evicts:
            raise UsageError("--policy full: evicts nothing; name a bounded policy")
        refuse_budget(budget, "the page has one size for all layers")
        if size is None:
            check_default_size(policy, default_size(tokens), f"at most {default_size(tokens)}")
        else:
            resolve(policy, size)
        chosen.append(policy)
    return chosen


def default_size(tokens: int) -> int:
    return min(LARGEST_DEFAULT_SIZE, max(2, tokens // 4))


def check_default_size(policy: Policy, size: int, description: str) -> None:
    """Refuse a policy that cannot have the default size; the message says that the user gave no --size."""
    try:
        resolve(policy, size)
    except UsageError as error:
        raise UsageError(
            f"--policy {policy.name} at the default --size of {description}: {error}; give --size"
        ) from error


def check_size(size: int | None, tokens: int, policies: list[Policy]) -> int:
    """The size, by default a quarter of the tokens. Refuses a size that evicts nothing."""
    chosen = default_size(tokens) if size is None else size
    if chosen + 1 >= tokens:
        if size is None:
            what_to_do = "give a longer text, more --tokens or --size 1"
            raise UsageError(f"{tokens:,} tokens: the default --size of {chosen} evicts none of them; {what_to_do}")
        raise UsageError(f"--size {chosen}: evicts none of {tokens:,} tokens; use a smaller size or a longer text")
    if size is None:
        for policy in policies:
            check_default_size(policy, chosen, f"{chosen}, a quarter of {tokens:,} tokens")
    return chosen
