"""Problems that are solved step by step: how many does a bounded state solve, with the prompt protected or not?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from msrnn.checks import check_choice, check_count, check_number
from msrnn.core.rope import COMPRESSED, ORIGINAL, name_of, spacing
from msrnn.errors import UsageError
from msrnn.evaluation.api.common import Folder, check_positions, decoder_config, model_name, open_store, result_of
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.cells import check_lists, check_row, grid
from msrnn.evaluation.data.problems import MATH, Problem, limit_problems, load_problems
from msrnn.evaluation.data.reasoning_prompts import ask_problems
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.tasks.math_verifier import check_verifier
from msrnn.evaluation.tasks.reasoning import CHECK, NAME, NONE, PROTECT, Case, Drawing, Reasoning, make_rnn
from msrnn.evaluation.tasks.reasoning_report import Report
from msrnn.policy import FULL, Policy

AUTO = "auto"
SAMPLING_TEMPERATURE = 0.7  # of several samples, if no temperature is given


def reasoning(
    model: PreTrainedModel,
    problems: str | Path | Sequence[str | Path] | Sequence[Problem],
    policies: Sequence[str | Policy] = ("tova", "echo", FULL.name),
    sizes: Sequence[int] = (128,),
    *,
    tokenizer: Any,
    protect: Sequence[str] = (NONE,),
    together: int = 1,
    samples: int = 1,
    temperature: float | None = None,
    seed: int = 0,
    limit: int | None = None,
    chat: bool | None = None,
    positions: str = AUTO,
    max_new_tokens: int = 2048,
    batch: int | None = None,
    folder: Folder = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> EvaluationResult[Report]:
    """Measure how many problems of GSM8K and MATH-500 are solved, step by step, by each policy at each size.

    A final answer is right if it is the expected number (GSM8K), or means the same by math-verify (MATH-500).

    problems        .jsonl files of GSM8K and MATH-500, or what `load_problems` read from them
    policies        policies or their names, or "full"; "echo + 64 recalled" recalls 64 archived KV rows
    sizes           KV rows per layer
    protect         "none", "prompt" or both: versions whose prompts are not evicted while answers are generated. At
                    most three quarters of a layer's rows are protected: of a longer prompt, only its first tokens
    together        problems in one prompt, which are solved one after the other in one answer
    samples         answers to each prompt: the mean over them, and pass@N, the share that at least one of them solves
    temperature     of the samples; None: 0 (greedy) for one sample, 0.7 for more
    seed            of the samples; a sample depends on it, on its prompt and on its number alone
    limit           problems of each dataset, at most; None: all
    chat            use the chat template; None: if there is one
    positions       of kept tokens: original, compressed, compact; "auto": compressed beyond the training length
    max_new_tokens  tokens of an answer, at most, for each problem of a prompt
    batch           answers generated at once; None: what suits the device
    folder          keep the records in FOLDER/reasoning.jsonl, so that another call reuses them; None: nowhere
    about           facts that are written into every record, such as the names of the `model` and the `file`
    """
    told = progress or Progress()
    cases = reasoning_cases(policies, sizes, protect)
    drawing = check_drawing(samples, temperature, seed, max_new_tokens)
    check_problems(limit, together, positions)
    chosen = limit_problems(_load(problems), limit)
    check_datasets(chosen)
    store = open_store(folder, NAME, CHECK)
    chat = bool(tokenizer.chat_template) if chat is None else chat
    told.note(f"making prompts of {len(chosen):,} problems")
    asked = ask_problems(tokenizer, chosen, together, chat)
    length = max(len(one.ids) + max_new_tokens * len(one.problems) for one in asked)
    config = decoder_config(model)
    check_positions(config, length, told.note, "max_new_tokens")
    if positions == AUTO:
        known = getattr(config, "max_position_embeddings", None)
        positions = COMPRESSED if known and length > known else ORIGINAL
    positions = name_of(spacing(positions))
    for case in cases:
        make_rnn(case.cell, model, positions, length)  # refuses what this model cannot do, before anything is computed
    source = {"model": model_name(model), **(about or {}), "chat": chat, "together": together}
    task = Reasoning(model, tokenizer, asked, drawing, chat, positions, {**source, **environment(model.device)})
    run = Runner(task, store, model, batch, workers)
    results = run.results(cases, told)
    others = run.other_results(cases)
    report = Report({**results, **others}, list(task.asked.values()), samples)
    title = f"{source['model']}" + (f", {together} problems in each prompt" if together > 1 else "")
    return result_of(
        report, report.tables(title), run.facts, report.markdown(title, run.facts), None, run, cases, list(others)
    )


def _load(problems: str | Path | Sequence[str | Path] | Sequence[Problem]) -> list[Problem]:
    given = [problems] if isinstance(problems, str | Path) else [*problems]
    files = [Path(one) for one in given if isinstance(one, str | Path)]
    if not given:
        raise UsageError("must not be empty", name="problems", value=problems, advice="give a file")
    return load_problems(files) if files else [one for one in given if isinstance(one, Problem)]


def reasoning_cases(policies: Sequence[str | Policy], sizes: Sequence[int], protect: Sequence[str]) -> list[Case]:
    """The full model if it is among the policies, then each policy at each size, with each protection.

    The full model evicts nothing, so that nothing needs protection.
    """
    check_lists(policies, sizes)
    for name in policies:
        for size in sizes:
            check_row(name, size)
    if isinstance(protect, str) or not protect:
        raise UsageError("must be a list of one or more", name="protect", value=protect)
    for kind in protect:
        check_choice("protect", kind, PROTECT)
    cells = grid(policies, sizes, sys.maxsize).cells
    kinds = list(dict.fromkeys(protect))
    return [Case(*cell, kind) for cell in cells for kind in (kinds if cell.size is not None else (NONE,))]


def check_drawing(samples: int, temperature: float | None, seed: int, max_new_tokens: int) -> Drawing:
    """Refuse bad values before anything is computed."""
    check_count("samples", samples)
    check_count("max_new_tokens", max_new_tokens)
    check_count("seed", seed, 0)
    if temperature is None:
        temperature = SAMPLING_TEMPERATURE if samples > 1 else 0.0
    temperature = check_number("temperature", temperature, 0, 100)
    if samples > 1 and not temperature:
        raise UsageError(
            "greedy answers to one prompt are all the same", name="samples", value=samples, advice="raise temperature"
        )
    return Drawing(samples, temperature, seed, max_new_tokens)


def check_problems(limit: int | None, together: int, positions: str) -> None:
    """Refuse bad values before anything is computed."""
    if limit is not None:
        check_count("limit", limit)
    check_count("together", together)
    if positions != AUTO:
        spacing(positions)


def check_datasets(problems: Sequence[Problem]) -> None:
    """Refuse problems whose answers cannot be compared, since a package is not installed."""
    if any(problem.dataset == MATH for problem in problems):
        check_verifier()
