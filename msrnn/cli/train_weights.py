from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.evaluation import show_progress, stoppable
from msrnn.cli.files import check_target
from msrnn.cli.options import Device, Dtype, Model
from msrnn.cli.terminal import note, quiet, show_table
from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import check_source

SIZES = (128, 256)

Texts = Annotated[
    list[Path] | None,
    Option(
        "--text",
        help="A kind of text: a folder of .txt files, one .txt file, .jsonl lines with a text, or .npy files of "
        "token ids; repeat for more kinds, which get equal shares.",
        show_default="PG-19's test set",
    ),
]
Out = Annotated[Path, Option(help="Write the weights to this .safetensors file.")]
PolicyName = Annotated[str, Option("--policy", help="The policy that the weights belong to; it ranks by value norms.")]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="KV rows of each layer; repeat for more: one file serves all.", show_default="128, 256"),
]
Ahead = Annotated[int, Option(help="Steps of the future that count: how far a row's worth is looked for.")]
Length = Annotated[int, Option(help="Tokens of a chunk.")]
Chunks = Annotated[int, Option(help="Chunks to train on, of all kinds together.")]
HeldOut = Annotated[int, Option(help="Chunks of each kind that are not trained on, for the report.")]
Moments = Annotated[int, Option(help="Moments of each chunk, at each size, at which evictions are learned.")]
Hidden = Annotated[int, Option(help="Numbers of each network's hidden layer, 1 to 256; the file grows with it.")]
Steps = Annotated[int, Option(help="Optimizer steps of a round.")]
Rounds = Annotated[
    int,
    Option(help="Rounds; each after the first reads the texts again, with what the weights so far keep."),
]
Seed = Annotated[int, Option(help="Random seed that selects texts, chunks, moments and the networks' first weights.")]
Restart = Annotated[bool, Option("--force", help="Replace the file if it exists, and unfinished work beside it.")]


def train_weights(
    *,
    text: Texts = None,
    out: Out = Path("weights.safetensors"),
    policy: PolicyName = "echo",
    size: Sizes = None,
    ahead: Ahead = 256,
    length: Length = 2048,
    chunks: Chunks = 40,
    held_out: HeldOut = 4,
    moments: Moments = 6,
    hidden: Hidden = 16,
    steps: Steps = 600,
    rounds: Rounds = 1,
    seed: Seed = 0,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = None,
    force: Restart = False,
) -> None:
    """Train row weights: small networks that say which KV rows of this model are worth keeping.

    The model is frozen, and reads the texts with a bounded state. Each network learns to rank a layer's rows by how
    much the outputs of the next steps change without them. The table at the end says what is lost on chunks that
    were not trained on; measure the perplexity as well, on other texts. Unfinished work is kept in a folder beside the
    file, and the same command resumes it.

    Examples:
        msrnn train-weights --text novels/ --text code/ --out weights.safetensors
        msrnn train-weights --text book.txt --chunks 8 --steps 200 --size 128
        msrnn eval perplexity --text other/ --policy echo@weights.safetensors
    """
    sources: list[Path | None] = [*text] if text else [None]
    for source in sources:
        check_source(source)
    check_target(out, force, [source for source in sources if source])
    if out.suffix != ".safetensors":
        raise UsageError("must end with .safetensors, as a policy names it", name="out", value=str(out))
    from msrnn.evaluation.data.texts import PG19, documents
    from msrnn.hf.loading import check_dtype, device_named, load
    from msrnn.hf.model_options import SMALL
    from msrnn.training.plan import TrainingPlan
    from msrnn.training.train import train_weights as train

    plan = TrainingPlan(policy, size or SIZES, ahead, length, chunks, held_out, moments, hidden, steps, rounds, seed)
    device_named(device)
    check_dtype(dtype)
    quiet()
    names = [source.resolve().name if source else PG19 for source in sources]
    kinds = {name: {one.name: one for one in documents(source)} for name, source in zip(names, sources, strict=True)}
    if len(kinds) < len(sources):
        raise UsageError("two have the same name", name="text", advice="rename one, or give both in one folder")
    loaded = load(model, device, dtype, on_convert=note)
    run = partial(train, loaded.model, kinds, out, plan, tokenizer=loaded.tokenizer, about={"model": model or SMALL})
    with stoppable(), show_progress() as callbacks:
        trained = run(restart=force, progress=callbacks)
    show_table(trained.table.title, trained.table.header, trained.table.strings())
    note(f"use it as --policy {plan.name(str(out))}")
