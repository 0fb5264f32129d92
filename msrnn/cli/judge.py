from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from msrnn.checks import check_count, check_number
from msrnn.cli.evaluation import note_resumed, stoppable
from msrnn.cli.evaluation_options import SkipDamaged
from msrnn.cli.options import Device, Dtype
from msrnn.cli.results_folder import open_store, read_store, report
from msrnn.cli.terminal import note, progress
from msrnn.errors import FileError, UsageError

if TYPE_CHECKING:
    from msrnn.evaluation.runner import Progress
    from msrnn.evaluation.store import Store
    from msrnn.evaluation.tasks.judge_models import Judge

NAME = "judge"
LEAST_TIMEOUT = 0.001  # seconds

Folder = Annotated[Path, Argument(help="The folder that `msrnn eval story` wrote to.")]
Name = Annotated[
    str | None,
    Option("--judge", help="A model behind an OpenAI-compatible endpoint, such as gpt-4o.", show_default=False),
]
BaseUrl = Annotated[str | None, Option(help="The endpoint's address.", show_default="OpenAI's")]
LocalModel = Annotated[
    str | None,
    Option("--model", help="A local judge: a folder, a .gguf file or a name on the hub.", show_default=False),
]
MaxRequests = Annotated[int | None, Option(help="Most requests to make.", show_default="as needed")]
Price = Annotated[
    tuple[float, float] | None,
    Option(help="Price of a million tokens to read, and to write; for the estimate.", show_default=False),
]
Timeout = Annotated[float, Option(help="Seconds to wait for an answer.")]
EstimateOnly = Annotated[bool, Option("--estimate", help="Only print what the judgement would cost.")]
Out = Annotated[
    Path | None, Option(help=f"Write {NAME}.jsonl, .md, .csv, .png and .svg here.", show_default="the folder")
]
Recompute = Annotated[
    bool,
    Option("--force", help="Ask this judge again, even if the folder has its answers; its other records are kept."),
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
    force: Recompute = False,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Compare the stories of a bounded model with the full model's of the same seed, by a judge.

    Each pair is shown twice, in both orders; it is a win or a loss only if both answers agree, otherwise a tie. An
    answer that cannot be parsed is requested once more, then counted separately. A local model answers with the option
    that it finds likeliest. Pairs in which nothing was evicted are dropped. The key of an endpoint is read from
    OPENAI_API_KEY and written nowhere. Every answer is kept, so an interrupted run resumes, and no answer is paid for
    twice.

    Examples:
        msrnn judge results/story --judge gpt-4o --price 2.5 10 --estimate
        msrnn judge results/story --judge gpt-4o --max-requests 100
        msrnn judge --judge qwen3 --base-url http://localhost:8000/v1
        msrnn judge --model Qwen/Qwen2.5-7B-Instruct
    """
    check(judge, base_url, model, max_requests, timeout)
    check_price(price)
    from msrnn import evaluation

    written, target = stories(folder, skip_damaged), out or folder
    chosen = endpoint(judge, base_url, timeout, estimate) if judge else local(model, device, dtype)
    store = answers(target, estimate, force, skip_damaged)
    callbacks = evaluation.Progress(note=note, resumed=note_resumed)
    cost = evaluation.judge_cost(written, chosen, folder=store, progress=callbacks)
    note(f"left to ask: {cost.summary(price)}")
    if estimate:
        return
    with stoppable(force), show_answers() as callbacks:
        result = evaluation.judge(written, chosen, max_requests=max_requests, folder=store, progress=callbacks)
    left = evaluation.judge_cost(written, chosen, folder=store)
    if left.requests:
        note(f"--max-requests {max_requests}: reached; left to ask: {left.summary(None)}")
    report(result, target)
    check_answers(chosen.name, [record["answer"] for record in result.records])


def check(name: str | None, base_url: str | None, model: str | None, max_requests: int | None, timeout: float) -> None:
    if (name is None) == (model is None):
        raise UsageError("give either --judge (a model behind an endpoint) or --model (a local model)")
    if base_url and model:
        raise UsageError(f"--base-url {base_url}: a local judge has no address; give --judge, or leave --base-url out")
    if base_url and not base_url.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {base_url}: must begin with http:// or https://")
    if max_requests is not None:
        check_count("max_requests", max_requests, advice="--estimate asks nothing")
    check_number("timeout", timeout, LEAST_TIMEOUT)


def check_price(price: tuple[float, float] | None) -> None:
    for value in price or ():
        check_number("price", value, 0)


def stories(folder: Path, skip_damaged: bool) -> Store:
    from msrnn.evaluation.tasks.story import CHECK

    path = folder / "story.jsonl"
    if not path.is_file():
        raise FileError("no such file", path, advice=f"generate stories first, with msrnn eval story --out {folder}")
    return read_store(path, CHECK, skip_damaged=skip_damaged)


def answers(folder: Path, estimate: bool, force: bool, skip_damaged: bool) -> Store:
    """The answers so far; an estimate with --force has none, and leaves the folder as it is."""
    from msrnn.evaluation.store import Store
    from msrnn.evaluation.tasks.judge import CHECK

    if estimate and (force or not folder.exists()):
        return Store(None)
    return open_store(folder, NAME, CHECK, force=force, skip_damaged=skip_damaged)


def endpoint(name: str, base_url: str | None, timeout: float, estimate: bool) -> Judge:
    """The endpoint. Refuses a missing key before anything is written; an estimate needs no key."""
    from msrnn.evaluation.tasks.judge_models import EndpointJudge

    client = EndpointJudge(name, base_url, timeout, on_retry=note)
    if not estimate:
        client.open()
    return client


def local(model: str | None, device: str, dtype: str | None) -> Judge:
    from msrnn.cli.evaluation_checks import check_positions
    from msrnn.cli.terminal import quiet
    from msrnn.evaluation.tasks.judge_models import LocalJudge
    from msrnn.hf.loading import load

    quiet()
    decoder, tokenizer = load(model, device, dtype, on_convert=note)
    path = Path(str(model))
    name = path.resolve().name if path.exists() else str(model)
    config = decoder.config.get_text_config(decoder=True)
    return LocalJudge(
        name, decoder, tokenizer, lambda tokens: check_positions(config, tokens, f"--model {model}: prompt of")
    )


@contextmanager
def show_answers() -> Iterator[Progress]:
    """Callbacks that show a bar of the answers."""
    from msrnn.evaluation.runner import Progress

    with progress("answers") as bar:
        task = bar.add_task("judging", total=None)
        yield Progress(total=lambda count: bar.update(task, total=count), tokens=partial(bar.advance, task))


def check_answers(name: str, answers: list[str]) -> None:
    """Refuse a judge none of whose answers can be read."""
    from msrnn.evaluation.tasks.verdicts import choice

    if answers and not any(choice(answer) for answer in answers):
        raise UsageError(
            f"{name}: none of its {len(answers):,} answers can be read, the first is {reprlib.repr(answers[0])}; "
            "use a judge that answers (A), (B) or (C)"
        )
