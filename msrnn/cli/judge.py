from __future__ import annotations

import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from msrnn.cli.options import Device, Dtype
from msrnn.cli.results import SkipDamaged, drawn, open_store, resumed, stoppable, written
from msrnn.cli.terminal import note, progress
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.evaluation.judge.run import Court, Judge
    from msrnn.evaluation.store import Store

NAME = "judge"

Folder = Annotated[Path, Argument(help="The folder that `msrnn eval story` wrote to.")]
Name = Annotated[
    str | None,
    Option("--judge", help="A model behind an OpenAI-compatible endpoint, as gpt-4o.", show_default=False),
]
BaseUrl = Annotated[str | None, Option(help="The endpoint's address.", show_default="OpenAI's")]
LocalModel = Annotated[
    str | None,
    Option("--model", help="A local judge: a folder, a .gguf file or a name on the hub.", show_default=False),
]
MaxRequests = Annotated[int | None, Option(help="Ask no more often than this.", show_default="as needed")]
Price = Annotated[
    tuple[float, float] | None,
    Option(help="Of a million tokens to read, and to write; for the estimate.", show_default=False),
]
Timeout = Annotated[float, Option(help="Seconds to wait for an answer.")]
EstimateOnly = Annotated[bool, Option("--estimate", help="Only say what the judgement would cost.")]
Out = Annotated[
    Path | None, Option(help=f"Write {NAME}.jsonl, .md, .csv, .png and .svg here.", show_default="the folder")
]
Anew = Annotated[
    bool, Option("--force", help="Ask this judge again, though the folder has its answers; other rows stay.")
]


def judge(
    folder: Folder = Path("results/story"),
    judge: Name = None,
    base_url: BaseUrl = None,
    model: LocalModel = None,
    max_requests: MaxRequests = None,
    price: Price = None,
    timeout: Timeout = 60.0,
    estimate: EstimateOnly = False,
    device: Device = "auto",
    dtype: Dtype = None,
    out: Out = None,
    force: Anew = False,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Which is better: the stories of a bounded model, or the full model's of the same seed?

    Each pair is shown twice, in both orders, and is a win only if both answers agree; else it is a tie. An answer that
    cannot be read is asked for once more, then counted apart; a local model's answer is the option that is likeliest to
    it. Pairs in which nothing was forgotten are dropped. An endpoint's key is read from OPENAI_API_KEY and written
    nowhere. Every answer is kept with the fingerprint of what was asked, so a judgement that was stopped goes on, and
    pays nothing twice.

    Examples:
        msrnn judge results/story --judge gpt-4o --price 2.5 10 --estimate
        msrnn judge results/story --judge gpt-4o --max-requests 100
        msrnn judge --judge qwen3 --base-url http://localhost:8000/v1
        msrnn judge --model Qwen/Qwen2.5-7B-Instruct
    """
    check(judge, base_url, model, max_requests, timeout)
    check_price(price)
    from msrnn.evaluation.judge.pairs import pairs
    from msrnn.evaluation.judge.run import Court
    from msrnn.evaluation.setting import setting

    found = pairs(stories(folder, skip_damaged))
    where = out or folder
    judging = endpoint(judge, base_url, timeout, estimate) if judge else local(model, device, dtype)
    court = Court(judging, found, answers(where, estimate, force, skip_damaged), max_requests)
    dropped = sum(found.dropped.values())
    note(f"{len(found.pairs):,} pairs; {dropped:,} more, in which nothing was forgotten, are dropped")
    resumed(*court.done(), "answers")
    note(f"left to ask: {court.cost().told(price)}")
    if estimate:
        return
    told = {
        name: str(value) for name, value in {"judge": judging.name, **found.told, **setting(judging.device)}.items()
    }
    with stoppable(force):
        ruled(court)
    finish(court, where, told)
    if unread := court.unreadable():
        raise UsageError(
            f"{judging.name}: none of its {len(unread):,} answers can be read, the first is {reprlib.repr(unread[0])}; "
            "take a judge that answers (A), (B) or (C)"
        )


def check(name: str | None, base_url: str | None, model: str | None, max_requests: int | None, timeout: float) -> None:
    if (name is None) == (model is None):
        raise UsageError("give --judge, a model behind an endpoint, or --model, one on this machine; and not both")
    if base_url and model:
        raise UsageError(f"--base-url {base_url}: a local judge has none; give --judge, or leave it out")
    if base_url and not base_url.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {base_url}: must begin with http:// or https://")
    if max_requests is not None and max_requests < 1:
        raise UsageError(f"--max-requests {max_requests}: must be 1 or more; --estimate asks nothing")
    if not 0 < timeout < float("inf"):
        raise UsageError(f"--timeout {timeout}: must be above 0 seconds")


def check_price(price: tuple[float, float] | None) -> None:
    for value in price or ():
        if not 0 <= value < float("inf"):
            raise UsageError(f"--price {value}: must be a number, 0 or more")


def stories(folder: Path, skip_damaged: bool) -> Store:
    from msrnn.evaluation.store import Store
    from msrnn.evaluation.story.run import CHECK

    path = folder / "story.jsonl"
    if not path.is_file():
        raise UsageError(f"{path}: no such file; tell stories first, with msrnn eval story --out {folder}")
    return Store(path, CHECK, skip_damaged=skip_damaged)


def answers(folder: Path, estimate: bool, force: bool, skip_damaged: bool) -> Store:
    """Those that a judgement goes on from; an estimate of one that starts anew leaves the folder alone."""
    from msrnn.evaluation.judge.run import CHECK
    from msrnn.evaluation.store import Store

    if estimate and (force or not folder.exists()):
        return Store(None)
    return open_store(folder, NAME, CHECK, force=force, skip_damaged=skip_damaged)


def endpoint(name: str, base_url: str | None, timeout: float, estimate: bool) -> Judge:
    """Refused without a key before --force forgets anything; an estimate asks nothing, and needs none."""
    from msrnn.evaluation.judge.endpoint import Endpoint

    judge = Endpoint(name, base_url, timeout, on_wait=note)
    if not estimate:
        judge.open()
    return judge


def local(model: str | None, device: str, dtype: str | None) -> Judge:
    from msrnn.cli.eval.common import check_positions, quiet
    from msrnn.evaluation.judge.local import Local
    from msrnn.hf.loading import load

    quiet()
    decoder, tokenizer = load(model, device, dtype, on_convert=note)
    name = Path(str(model))
    named = name.resolve().name if name.exists() else str(model)
    config = decoder.config.get_text_config(decoder=True)
    return Local(
        named, decoder, tokenizer, lambda tokens: check_positions(config, tokens, f"--model {model}: prompt of")
    )


def ruled(court: Court) -> None:
    """All pairs, or as many as --max-requests allows, with a bar."""
    with progress("pairs") as bar:
        task = bar.add_task("judging", total=len(court.pairs.pairs))
        whole = court.judge_all(lambda _: bar.advance(task))
    if not whole:
        note(f"--max-requests {court.most}: reached; left to ask: {court.cost().told(None)}")


def finish(court: Court, folder: Path, told: dict[str, str]) -> None:
    from msrnn.cli.terminal import show_table
    from msrnn.evaluation.judge.report import HEADERS, as_csv, figure, lines, markdown, rows

    found = lines(court.verdicts(), court.leanings(), court.pairs.dropped)
    title = f"{told['model']}, judged by {told['judge']}"
    show_table(f"bounded against full: {title}", HEADERS, rows(found))
    (folder / f"{NAME}.md").write_text(markdown(found, title, told))
    (folder / f"{NAME}.csv").write_text(as_csv(found))
    written(folder, NAME, ("jsonl", "md", "csv", *drawn(lambda: figure(found, folder, title))))
