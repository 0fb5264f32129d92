from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn.cli.eval.common import check_batch
from msrnn.cli.options import ORIGINAL, SMALL, Device, Dtype, Model, PolicyName
from msrnn.cli.results import SkipDamaged, drawn, open_store, shown_as_well, stoppable, written
from msrnn.cli.terminal import note, show_table, show_text
from msrnn.errors import UsageError
from msrnn.evaluation.efficiency import NATIVE, PROMPT
from msrnn.policy import FULL, is_full, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.evaluation.efficiency.bench import Row

SIZES, AS_THE_MODEL, AS_IN_THE_TEXT = [256, 512, 1024, 2048], [NATIVE], [ORIGINAL]

Sizes = Annotated[list[int], Option("--size", help="States that each layer may hold; repeat for more.")]
Length = Annotated[int, Option(help="Tokens of a prompt, and of a whole sequence.")]
Batch = Annotated[int | None, Option(help="Measure at this batch, not at the largest that fits.", show_default=False)]
MaxBatch = Annotated[int | None, Option(help="Never try a larger batch.", show_default="8 on cpu, else as fits")]
EqualBatch = Annotated[
    int | None, Option(help="A batch at which all are measured.", show_default="1 on cpu, else 128 or what full fits")
]
PrefillBatch = Annotated[int | None, Option(help="Prompts read at once.", show_default="1 on cpu, else 8")]
StateDtypes = Annotated[
    list[str], Option("--state-dtype", help="States in 16-bit (the model's own dtype), int8 or fp8; repeat for more.")
]
Positions = Annotated[
    list[str], Option("--positions", help="Where kept tokens stand: original, compressed, …; repeat for more.")
]
Compile = Annotated[
    bool | None, Option("--compile/--no-compile", help="Compile what lies between kernels.", show_default="on cuda")
]
Others = Annotated[
    list[str] | None,
    Option("--with", metavar="MODULE:ATTRIBUTE", help="One more contender; repeat for more.", show_default=False),
]
Shape = Annotated[
    str | None, Option("--random-weights", help="No model, but the shape of one, as llama-2-7b.", show_default=False)
]
Out = Annotated[Path | None, Option(help="Write efficiency.jsonl, .md, .png and .svg here.", show_default=False)]
Anew = Annotated[
    bool, Option("--force", help="Measure what is asked for again, though the folder has it; other rows stay.")
]


def bench(
    size: Sizes = SIZES,
    length: Length = 4096,
    batch: Batch = None,
    max_batch: MaxBatch = None,
    equal_batch: EqualBatch = None,
    prefill_batch: PrefillBatch = None,
    policy: PolicyName = "tova",
    state_dtype: StateDtypes = AS_THE_MODEL,
    positions: Positions = AS_IN_THE_TEXT,
    compile: Compile = None,
    others: Others = None,
    model: Model = None,
    random_weights: Shape = None,
    device: Device = "auto",
    dtype: Dtype = None,
    out: Out = None,
    force: Anew = False,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Memory, batch, time and throughput of a decode step at each size, beside the full model and the step's floor.

    States hold random keys and values, as if they had read. The floor is the bytes of all states over the read
    bandwidth, plus the larger of the weights' bytes over it and the matrix products alone; all are measured in the same
    run. The full model has a static cache that grows by buckets of 512 rows, and runs in CUDA graphs on CUDA. The
    time of a whole sequence is the sum, over these buckets, of the steps in it times the median step there; a bounded
    state has one such time. Times are medians of repeated runs, with the fastest and the slowest; runs that disagree
    are repeated, and a step below its floor is measured again and marked. With --out, what the folder has from the
    same model, machine, versions and commit is not measured again, and the table shows all of it.

    Examples:
        msrnn bench --size 64 --length 256
        msrnn bench --random-weights llama-2-7b --out results
        msrnn bench --size 512 --state-dtype 16-bit --state-dtype int8
        msrnn bench --size 512 --positions original --positions compressed
        msrnn bench --size 512 --with benchmarks.published:published
    """
    check(size, policy, state_dtype, positions, length)
    batches = {"batch": batch, "max_batch": max_batch, "equal_batch": equal_batch, "prefill_batch": prefill_batch}
    check_batch(**batches)
    if model is not None and random_weights is not None:
        raise UsageError(f"--random-weights {random_weights}: give this or --model, not both")
    from msrnn.evaluation.efficiency.bench import Asked, Bench
    from msrnn.evaluation.efficiency.contenders import setup
    from msrnn.evaluation.efficiency.ledger import Ledger, check_row
    from msrnn.evaluation.efficiency.lineup import Lineup, imported
    from msrnn.evaluation.setting import setting
    from msrnn.evaluation.store import Store

    factories = [imported(name) for name in others or []]
    store = open_store(out, "efficiency", check_row, force=force, skip_damaged=skip_damaged) if out else Store(None)
    decoder = load(model, random_weights, device, dtype)
    if compile is None:
        compile = decoder.device.type == "cuda"
    told = {
        "model": f"random weights of {random_weights}" if random_weights else model or SMALL,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "length": length,
        "compile": compile,
        **setting(decoder.device),
    }
    made = setup(decoder, length)
    contenders = Lineup(policy, size, state_dtype, compile, positions, factories).contenders(made, note)
    ledger = Ledger(store, told)
    if ledger.known:
        note(f"{ledger.known:,} measurements already done; --force makes them again")
    measuring = Bench(made, Asked(**batches), ledger, note)
    with stoppable(force, kept=out is not None):
        rows = measuring.table(contenders)
    earlier = measuring.others(rows)
    shown_as_well([row.label for row in earlier], 0)
    rows += earlier
    title = f"{told['model']}, {length:,} tokens, {told.get('gpu') or told['machine']}"
    show(rows, title)
    if out:
        write(rows, out, title, {name: str(value) for name, value in told.items()})


def check(sizes: list[int], policy: str, state_dtypes: list[str], positions: list[str], length: int) -> None:
    if is_full(policy):
        raise UsageError(f"--policy {FULL}: the full model is measured anyway; name a policy that forgets")
    for size in sizes:
        resolve(policy, size)
    for name in state_dtypes:
        if name != NATIVE:
            check_state_dtype(name)
    for name in positions:
        if name != ORIGINAL:
            check_positions(name)
    if length <= PROMPT:
        raise UsageError(f"--length {length}: must be more than {PROMPT}, the tokens a whole sequence starts from")


def check_state_dtype(name: str) -> None:
    from msrnn.core.quantization import STATE_DTYPES

    if name not in STATE_DTYPES:
        raise UsageError(f"--state-dtype {name}: must be one of {', '.join((NATIVE, *STATE_DTYPES))}")


def check_positions(name: str) -> None:
    from msrnn.core.rope import spacing

    spacing(name)


def load(name: str | None, shape: str | None, device: str, dtype: str | None) -> PreTrainedModel:
    import transformers

    from msrnn.evaluation.efficiency.random_weights import random_model
    from msrnn.hf import loading as models

    transformers.logging.set_verbosity_error()
    return random_model(shape, device, dtype) if shape else models.load(name, device, dtype, on_convert=note).model


def show(rows: list[Row], title: str) -> None:
    """Names in short lines, so that more columns fit side by side."""
    from msrnn.evaluation.efficiency.tables import headers, lines, remarks

    show_table(title, ["\n".join(wrap(name, 9, break_long_words=False)) for name in headers(rows)], lines(rows))
    for remark in remarks(rows):
        show_text(remark)


def write(rows: list[Row], folder: Path, title: str, told: dict[str, str]) -> None:
    from msrnn.evaluation.efficiency.figure import figure
    from msrnn.evaluation.efficiency.tables import markdown

    (folder / "efficiency.md").write_text(markdown(rows, told))
    written(folder, "efficiency", ("jsonl", "md", *drawn(lambda: figure(rows, folder, title))))
