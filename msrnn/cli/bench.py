from __future__ import annotations

from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn.cli.evaluation import stoppable
from msrnn.cli.evaluation_checks import check_batch
from msrnn.cli.evaluation_options import SkipDamaged
from msrnn.cli.options import Device, Dtype, Model, PolicyName
from msrnn.cli.results_folder import note_other_records, open_store, show_tables, write_report
from msrnn.cli.terminal import note, show_text
from msrnn.errors import UsageError
from msrnn.evaluation.benchmark import NATIVE
from msrnn.hf.model_options import ORIGINAL, SMALL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.evaluation.api.result import EvaluationResult
    from msrnn.evaluation.benchmark.table import Row

SIZES, DEFAULT_STATE_DTYPES, DEFAULT_POSITIONS = [256, 512, 1024, 2048], [NATIVE], [ORIGINAL]

Sizes = Annotated[list[int], Option("--size", help="KV rows per layer; repeat to measure several.")]
Length = Annotated[int, Option(help="Tokens of a prompt, and of a whole sequence.")]
Batch = Annotated[
    int | None, Option(help="Measure at this batch size, not at the largest that fits.", show_default=False)
]
MaxBatch = Annotated[int | None, Option(help="Never try a larger batch.", show_default="8 on cpu, else as fits")]
EqualBatch = Annotated[
    int | None,
    Option(
        help="Batch size at which all contenders are measured.",
        show_default="1 on cpu, else 128, or fewer if full fits fewer",
    ),
]
PrefillBatch = Annotated[int | None, Option(help="Prompts read at once.", show_default="1 on cpu, else 8")]
StateDtypes = Annotated[
    list[str],
    Option(
        "--state-dtype",
        help="Dtype of KV rows: 16-bit (the model's own dtype), int8 or fp8; repeat to measure several.",
    ),
]
Positions = Annotated[
    list[str],
    Option("--positions", help="Position ids of kept tokens: original, compressed, …; repeat to measure several."),
]
Compile = Annotated[
    bool | None,
    Option(
        "--compile/--no-compile",
        help="Compile the code between the attention kernels with torch.compile.",
        show_default="on cuda",
    ),
]
Others = Annotated[
    list[str] | None,
    Option(
        "--with", metavar="MODULE:ATTRIBUTE", help="Also measure this contender; repeat for more.", show_default=False
    ),
]
Shape = Annotated[
    str | None,
    Option(
        "--random-weights",
        help="Use random weights of a known shape, such as llama-2-7b, instead of a model.",
        show_default=False,
    ),
]
Out = Annotated[Path | None, Option(help="Write efficiency.jsonl, .md, .png and .svg here.", show_default=False)]
Recompute = Annotated[
    bool,
    Option("--force", help="Measure again, even if the folder has these measurements; its other records are kept."),
]


def bench(
    size: Sizes = SIZES,
    length: Length = 4096,
    batch: Batch = None,
    max_batch: MaxBatch = None,
    equal_batch: EqualBatch = None,
    prefill_batch: PrefillBatch = None,
    policy: PolicyName = "tova",
    state_dtype: StateDtypes = DEFAULT_STATE_DTYPES,
    positions: Positions = DEFAULT_POSITIONS,
    compile: Compile = None,
    others: Others = None,
    model: Model = None,
    random_weights: Shape = None,
    device: Device = "auto",
    dtype: Dtype = None,
    out: Out = None,
    force: Recompute = False,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Memory, batch, time and throughput of a decode step at each size, with the full model and the step's floor.

    States hold random keys and values. The floor is a lower limit of the step's time: the bytes of all states divided
    by the read bandwidth, plus the larger of two times, the weights' bytes divided by the bandwidth and the matrix
    products alone. All are measured in the same run. The full model has a static cache that grows by buckets of 512
    rows, and runs in CUDA graphs on CUDA; with --compile it is compiled too, and the faster one counts. The time of a
    whole sequence is the sum over these buckets of the number of steps times the median step; a
    bounded state has the same step time at every length. Times are medians of repeated
    runs, with the fastest and the slowest. Runs that differ much, or that share the CPU with other processes, are
    repeated. A step below its floor is measured
    again, and marked; on an idle machine, --force measures everything again. With --out, measurements of the same
    model, machine, versions and commit are not repeated, and the table shows all.

    Examples:
        msrnn bench --size 64 --length 256
        msrnn bench --random-weights llama-2-7b --out results
        msrnn bench --size 512 --state-dtype 16-bit --state-dtype int8
        msrnn bench --size 512 --positions original --positions compressed
        msrnn bench --size 512 --with benchmarks.published:published
    """
    batches = {"batch": batch, "max_batch": max_batch, "equal_batch": equal_batch, "prefill_batch": prefill_batch}
    check_batch(**batches)
    if model is not None and random_weights is not None:
        raise UsageError(f"--random-weights {random_weights}: --model is given too; leave one out")
    from msrnn import evaluation
    from msrnn.evaluation.api.efficiency import check_contenders
    from msrnn.evaluation.benchmark.contenders import load_factory
    from msrnn.evaluation.benchmark.measurement import check_record
    from msrnn.evaluation.benchmark.table import NAME

    check_contenders(policy, size, state_dtype, positions, length)
    factories = [load_factory(name) for name in others or []]
    store = open_store(out, NAME, check_record, force=force, skip_damaged=skip_damaged) if out else None
    decoder = load(model, random_weights, device, dtype)
    with stoppable(force, kept=out is not None):
        result = evaluation.efficiency(
            decoder,
            policy,
            size,
            length=length,
            **batches,
            state_dtypes=state_dtype,
            positions=positions,
            compile=compile,
            others=factories,
            folder=store,
            about={"model": f"random weights of {random_weights}" if random_weights else model or SMALL},
            progress=evaluation.Progress(note=note),
        )
    report(result, out)


def report(result: EvaluationResult[list[Row]], folder: Path | None) -> None:
    """Print the table and remarks on its times, and write them and the figure."""
    from msrnn.evaluation.benchmark.table import remarks

    note_other_records(result.others, 0)
    # Wrapped headers let more columns fit side by side.
    header = ["\n".join(wrap(name, 9, break_long_words=False)) for name in result.table.header]
    show_tables([result.table._replace(header=header)])
    for remark in remarks(result.report):
        show_text(remark)
    if folder:
        write_report(folder, result.table, result.page, partial(result.draw, folder) if result.draw else None)


def load(name: str | None, shape: str | None, device: str, dtype: str | None) -> PreTrainedModel:
    import transformers

    from msrnn.evaluation.benchmark.random_weights import random_model
    from msrnn.hf import loading

    transformers.logging.set_verbosity_error()
    return random_model(shape, device, dtype) if shape else loading.load(name, device, dtype, on_convert=note).model
