from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.evaluation import evaluate_model, load_model
from msrnn.cli.evaluation_checks import check_counts
from msrnn.cli.evaluation_options import Chat, EvaluationOptions
from msrnn.cli.options import MaxNewTokens, as_typed
from msrnn.cli.results_folder import report
from msrnn.errors import UsageError

NAME = "story"
POLICIES, SIZES = ("tova",), (256, 512, 1024)

Policies = Annotated[
    list[str] | None,
    Option("--policy", help="Eviction policy; repeat for more. The full model is always added.", show_default="tova"),
]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="KV rows per layer; repeat for more.", show_default="256, 512, 1024"),
]
Count = Annotated[int, Option(help="Number of stories of each version.")]
Seed = Annotated[int, Option(help="Random seed of the first story; the next ones count up from it.")]
SampleTemperature = Annotated[float, Option(help="Sample at this temperature.")]
Batch = Annotated[
    int | None, Option(help="Stories generated at once.", show_default="8 on cpu, 50 on cuda, or what fits")
]
Out = Annotated[Path, Option(help=f"Write {NAME}.jsonl, .md and .csv here.")]


def story(
    *,
    policy: Policies = None,
    size: Sizes = None,
    stories: Count = 100,
    max_new_tokens: MaxNewTokens = 4096,
    temperature: SampleTemperature = 1.0,
    seed: Seed = 0,
    chat: Chat = None,
    batch: Batch = None,
    out: Out = Path(f"results/{NAME}"),
    options: EvaluationOptions,
) -> None:
    """Generate long stories with every version of a model, one per seed, for `msrnn judge` to compare.

    The noise of a token depends on the seed and on the token's number, not on the batch or the version. Until its first
    eviction has an effect, a version writes the full model's story, so that part is copied. Stories that the folder has
    are not generated again, so an interrupted run resumes.

    Examples:
        msrnn eval story --stories 2 --size 64 --max-new-tokens 128
        msrnn eval story --model Gryphe/MythoLogic-L2-13b --no-chat
        msrnn eval story --policy tova --policy window+4 --size 256
    """
    policies, sizes = policy or POLICIES, size or SIZES
    check_counts(stories=stories, max_new_tokens=max_new_tokens, batch=batch)
    if not 0 < temperature <= 100:
        raise UsageError(
            f"--temperature {as_typed(temperature)}: must be above 0, and at most 100; 0.01 is nearly greedy"
        )
    from msrnn import evaluation
    from msrnn.evaluation.api.stories import check_versions
    from msrnn.evaluation.tasks.story import CHECK

    check_versions(policies, sizes)
    options.check()
    loaded = load_model(options, out, NAME, CHECK)
    run = partial(
        evaluation.stories,
        policies=policies,
        sizes=sizes,
        count=stories,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        batch=batch,
    )
    report(evaluate_model(options, loaded, run), out)
