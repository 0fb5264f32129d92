from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from msrnn.cli.evaluation import evaluate_model, load_model
from msrnn.cli.evaluation_checks import check_batch
from msrnn.cli.evaluation_options import Chat, EvaluationOptions
from msrnn.cli.recall_options import RecallOptions
from msrnn.cli.results_folder import report
from msrnn.policy import FULL

AUTO = "auto"
POLICIES, SIZES = ("tova", "echo", FULL.name), (128,)


class Protected(StrEnum):
    NONE = "none"
    PROMPT = "prompt"


Sources = Annotated[
    list[Path], Argument(metavar="FILE...", help="Problems: .jsonl files of GSM8K or MATH-500, told by their fields.")
]
Policies = Annotated[
    list[str] | None,
    Option("--policy", help="A version of the model: a policy, or full; repeat.", show_default=", ".join(POLICIES)),
]
Sizes = Annotated[list[int] | None, Option("--size", help="KV rows per layer; repeat for more.", show_default="128")]
Protect = Annotated[
    list[Protected] | None,
    Option(
        help="Evict prompts as anything else (none), or not while answers are generated (prompt); repeat for both.",
        show_default="none",
    ),
]
Together = Annotated[int, Option(help="Problems in one prompt, solved one after the other in one long answer.")]
Samples = Annotated[int, Option(help="Answers to each prompt; more than one are drawn at random.")]
Temperature = Annotated[
    float | None,
    Option(help="Sampling temperature; 0: the most likely token.", show_default="0, or 0.7 for several samples"),
]
Seed = Annotated[int, Option(help="Random seed of the samples.")]
Limit = Annotated[int | None, Option(help="Most problems of each dataset.", show_default="all")]
Positions = Annotated[
    str,
    Option(
        help="Positions of kept tokens: original, compressed, compact; auto: compressed beyond the training length."
    ),
]
MaxNewTokens = Annotated[
    int,
    Option("--max-new-tokens", "--max-tokens", help="Most tokens of an answer, for each problem of its prompt."),
]
Batch = Annotated[
    int | None, Option(help="Answers generated at once.", show_default="8 on cpu, 128 or what fits on cuda")
]
Out = Annotated[Path, Option(help="Write reasoning.jsonl, .md and .csv here.")]


def reasoning(
    *,
    files: Sources,
    policy: Policies = None,
    size: Sizes = None,
    protect: Protect = None,
    together: Together = 1,
    samples: Samples = 1,
    temperature: Temperature = None,
    seed: Seed = 0,
    limit: Limit = None,
    chat: Chat = None,
    positions: Positions = AUTO,
    max_new_tokens: MaxNewTokens = 2048,
    batch: Batch = None,
    out: Out = Path("results/reasoning"),
    recalling: RecallOptions,
    options: EvaluationOptions,
) -> None:
    """Problems solved step by step (GSM8K, MATH-500), by policy and size, with or without the prompt protected.

    The final answer is the last \\boxed{}; of a number also "#### 18", "the answer is 18", or the last number. Numbers
    must be equal; LaTeX is compared by math-verify (the extra "reasoning"). With --protect prompt, the tokens
    of the prompt are not evicted while the answer is generated: a version of its own, as "echo 128, prompt protected".
    At most three quarters of a layer's rows are protected; of a longer prompt, only its first tokens.

    Answers are greedy; with --samples N, N are drawn, and the table has their mean and pass@N. With --together K, one
    answer solves K problems, and each counts by itself. The tables have 95 % intervals, by bootstrap over the prompts,
    the length of answers, and paired differences. Answers that the folder has of the same model, prompt and version are
    not generated again, so an interrupted run resumes.

    Examples:
        msrnn eval reasoning gsm8k.jsonl --limit 100
        msrnn eval reasoning gsm8k.jsonl math500.jsonl --policy full --samples 4
        msrnn eval reasoning gsm8k.jsonl --policy echo --size 128 --protect prompt
        msrnn eval reasoning gsm8k.jsonl --together 8 --size 512 --max-new-tokens 512
    """
    from msrnn.evaluation.data.problems import check_sources, load_problems

    check_sources(files)
    check_batch(batch=batch)
    from msrnn import evaluation
    from msrnn.evaluation.api.reasoning import check_datasets, check_drawing, check_problems, reasoning_cases
    from msrnn.evaluation.tasks.reasoning import CHECK, NAME

    policies, sizes, kinds = recalling.add_to(policy or POLICIES), size or SIZES, protect or [Protected.NONE]
    reasoning_cases(policies, sizes, kinds)
    check_drawing(samples, temperature, seed, max_new_tokens)
    check_problems(limit, together, positions)
    options.check()
    problems = load_problems(files)
    check_datasets(problems)
    loaded = load_model(options, out, NAME, CHECK, file=", ".join(file.name for file in files))
    run = partial(
        evaluation.reasoning,
        problems=problems,
        policies=policies,
        sizes=sizes,
        protect=[str(kind) for kind in kinds],
        together=together,
        samples=samples,
        temperature=temperature,
        seed=seed,
        limit=limit,
        chat=chat,
        positions=positions,
        max_new_tokens=max_new_tokens,
        batch=batch,
    )
    report(evaluate_model(options, loaded, run), out)
