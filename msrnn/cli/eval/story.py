from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.eval.common import Anew, check_counts, check_positions, quiet
from msrnn.cli.eval.terminal import watched
from msrnn.cli.eval.understanding import Chat
from msrnn.cli.options import SMALL, Device, Dtype, MaxNewTokens, Model
from msrnn.cli.results import SkipDamaged, open_store, shown_as_well, stoppable, written
from msrnn.cli.terminal import note, show_table
from msrnn.errors import UsageError
from msrnn.policy import FULL, resolve

NAME = "story"
POLICIES, SIZES = ("tova",), (256, 512, 1024)

Policies = Annotated[
    list[str] | None, Option("--policy", help="A policy, beside full; repeat for more.", show_default="tova")
]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="States that each layer may hold; repeat for more.", show_default="256, 512, 1024"),
]
Count = Annotated[int, Option(help="Stories of each version.")]
Seed = Annotated[int, Option(help="Of the first story; the others follow.")]
Warmth = Annotated[float, Option(help="Sample at this temperature.")]
Batch = Annotated[int | None, Option(help="Stories told at once.", show_default="8 on cpu, 50 on cuda")]
Out = Annotated[Path, Option(help=f"Write {NAME}.jsonl, .md and .csv here.")]


def story(
    policy: Policies = None,
    size: Sizes = None,
    stories: Count = 100,
    max_new_tokens: MaxNewTokens = 4096,
    temperature: Warmth = 1.0,
    seed: Seed = 0,
    chat: Chat = None,
    batch: Batch = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = None,
    out: Out = Path(f"results/{NAME}"),
    force: Anew = False,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Long stories of every version of a model, a seed each, to be compared by `msrnn judge`.

    A seed decides the noise that is added to the logits before the likeliest token is taken, whatever the batch and
    the version. The full model has a state with room for everything; what a version tells before it can have forgotten
    anything is the full model's story, and is taken over from there. Stories that the folder has are not told again, so
    a run that was stopped goes on.

    Examples:
        msrnn eval story --stories 2 --size 64 --max-new-tokens 128
        msrnn eval story --model Gryphe/MythoLogic-L2-13b --no-chat
        msrnn eval story --policy tova --policy window+4 --size 256
    """
    policies, sizes = policy or POLICIES, size or SIZES
    for name in policies:
        for states in sizes:
            resolve(name, states)
    check_counts(2, stories=stories, max_new_tokens=max_new_tokens, batch=batch)
    if not 0 < temperature < float("inf"):
        raise UsageError(f"--temperature {temperature}: must be above 0; 0.01 is nearly the likeliest token")
    from msrnn.evaluation.cells import Cell, table
    from msrnn.evaluation.prompts import STORY
    from msrnn.evaluation.setting import setting
    from msrnn.evaluation.speaking import ends_of, prompted
    from msrnn.evaluation.story.report import HEADERS, as_csv, lines, markdown, rows
    from msrnn.evaluation.story.run import CHECK, Run, Telling
    from msrnn.hf.loading import check_dtype, device_named, load

    device_named(device)
    check_dtype(dtype)
    quiet()
    store = open_store(out, NAME, CHECK, force=force, skip_damaged=skip_damaged)
    decoder, tokenizer = load(model, device, dtype, on_convert=note)
    chat = bool(tokenizer.chat_template) if chat is None else chat
    prompt = prompted(tokenizer, STORY, chat)
    whole = len(prompt) + max_new_tokens
    check_positions(decoder.config.get_text_config(decoder=True), whole, "--max-new-tokens")
    telling = Telling(prompt, max_new_tokens, temperature, list(range(seed, seed + stories)))
    cells = list(dict.fromkeys([Cell(FULL, None), *table(policies, sizes, whole).cells]))
    batch = batch or (50 if decoder.device.type == "cuda" else 8)
    told = {"model": model or SMALL, "chat": chat, "batch": batch, **setting(decoder.device)}
    run = Run(decoder, tokenizer, telling, ends_of(decoder, tokenizer), store, batch, told)
    with stoppable(force):
        stories_told = watched(run, cells)
    others = run.others(cells)
    shown_as_well([cell.label for cell in others], len(store.rows) - len(store.matching(run.key)))
    found = lines({**stories_told, **others})
    title = f"{told['model']}, {stories:,} stories of at most {max_new_tokens:,} tokens"
    show_table(f"stories: {title}", HEADERS, rows(found))
    beside = {name: str(value) for name, value in {**run.key, **told}.items()}
    (out / f"{NAME}.md").write_text(markdown(found, title, beside))
    (out / f"{NAME}.csv").write_text(as_csv(found))
    written(out, NAME, ("jsonl", "md", "csv"))
