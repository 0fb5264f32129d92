"""Memory, largest batch, time and throughput of a decode step: the benchmark of bounded models against the full one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from msrnn.checks import check_choice, check_count
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.rope import ORIGINAL, spacing
from msrnn.errors import UsageError
from msrnn.evaluation.api.common import Folder, model_name, open_store
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.benchmark import NATIVE, PROMPT
from msrnn.evaluation.benchmark.contenders import Factory, Lineup, setup
from msrnn.evaluation.benchmark.measurement import UNLIMITED, Batches, Benchmark, Ledger, check_record
from msrnn.evaluation.benchmark.table import NAME, Row, figure, markdown, table
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress
from msrnn.evaluation.store import Record, Store
from msrnn.policy import Policy
from msrnn.size import resolve


def efficiency(
    model: PreTrainedModel,
    policy: str | Policy = "tova",
    sizes: Sequence[int] = (256, 512, 1024, 2048),
    *,
    length: int = 4096,
    batch: int | None = None,
    max_batch: int | None = None,
    equal_batch: int | None = None,
    prefill_batch: int | None = None,
    state_dtypes: Sequence[str] = (NATIVE,),
    positions: Sequence[str] = (ORIGINAL,),
    compile: bool | None = None,
    others: Sequence[Factory] = (),
    folder: Folder = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> EvaluationResult[list[Row]]:
    """Measure a decode step of a policy at each size, of the full model, and the lower limit of its time.

    States hold random keys and values. Times are medians of repeated runs; `result.page` has remarks on them.

    sizes          KV rows per layer
    length         tokens of a prompt, and of a whole sequence
    batch          measure at this batch size; None: at the largest that fits, or `max_batch`
    max_batch      never try a larger batch; None: 8 on a CPU, otherwise what fits
    equal_batch    batch size at which all are measured; None: 1 on a CPU, otherwise 128, or what the full model fits
    prefill_batch  prompts read at once; None: 1 on a CPU, otherwise 8
    state_dtypes   of KV rows: "16-bit" (the model's own dtype), "int8", "fp8"
    positions      position ids of kept tokens: original, compressed, compact
    compile        compile the code between the attention kernels; None: on CUDA
    others         contenders to measure as well: functions of a `Setup` and a size
    folder         keep the measurements in FOLDER/efficiency.jsonl, so that another call reuses them; None: nowhere
    about          facts that are written into every record, such as the name of the `model`
    """
    told = progress or Progress()
    batches = {"batch": batch, "max_batch": max_batch, "equal_batch": equal_batch, "prefill_batch": prefill_batch}
    for name, value in batches.items():
        if value is not None:
            check_count(name, value, most=UNLIMITED)
    check_contenders(policy, sizes, state_dtypes, positions, length)
    if compile is None:
        compile = model.device.type == "cuda"
    facts = {
        "model": model_name(model),
        **(about or {}),
        "dtype": str(model.dtype).removeprefix("torch."),
        "length": length,
        "compile": compile,
        **environment(model.device),
    }
    check_name(model, facts, folder)
    ledger = Ledger(open_store(folder, NAME, check_record), facts)
    if ledger.known:
        told.note(f"{ledger.known:,} measurements already done")
    start = setup(model, length)
    lineup = Lineup(policy, sizes, state_dtypes, compile, positions, others)
    benchmark = Benchmark(start, Batches(**batches), ledger, told.note)
    rows = benchmark.rows(lineup.contenders(start, told.note))
    return result_of(rows, benchmark.others(rows), ledger.store, facts)


def check_contenders(
    policy: str | Policy, sizes: Sequence[int], state_dtypes: Sequence[str], positions: Sequence[str], length: int
) -> None:
    """Refuse bad values before anything is loaded or measured. Errors name one value: `size` for one of the sizes."""
    for size in sizes:
        if not resolve(policy, size)[0].evicts:
            raise UsageError(
                "the full model is always measured", name="policy", value=policy, advice="give a policy that evicts"
            )
    for name in state_dtypes:
        check_choice("state_dtype", name, (NATIVE, *STATE_DTYPES))
    for name in positions:
        spacing(name)
    if check_count("length", length) <= PROMPT:
        raise UsageError(
            f"must be more than {PROMPT}, the tokens a whole sequence starts from", name="length", value=length
        )


def check_name(model: PreTrainedModel, facts: Record, folder: Folder) -> None:
    """Refuse a folder for a model without a name: its measurements would be taken for those of another model."""
    kept = folder.path if isinstance(folder, Store) else folder
    if kept is not None and not model.name_or_path and facts["model"] == type(model).__name__:
        raise UsageError(
            "this model has no name, by which a folder finds its measurements",
            name="about",
            advice='give about={"model": NAME}',
        )


def result_of(rows: list[Row], earlier: list[Row], store: Store, facts: Record) -> EvaluationResult[list[Row]]:
    shown, records = [*rows, *earlier], store.matching(facts)
    title = f"{facts['model']}, {facts['length']:,} tokens, {facts.get('gpu') or facts['machine']}"
    return EvaluationResult(
        shown,
        [table(shown, title)],
        records,
        facts,
        markdown(shown, facts),
        lambda to: figure(shown, to, title),
        [row.label for row in earlier],
        len(store.records) - len(records),
    )
