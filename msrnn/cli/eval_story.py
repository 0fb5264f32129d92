from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.evaluation import (
    Chat,
    EvaluationOptions,
    check_counts,
    check_positions,
    computed,
    show_tables,
    write_report,
)
from msrnn.cli.options import MaxNewTokens, as_typed
from msrnn.errors import UsageError
from msrnn.size import parse_policy, refuse_budget, resolve

NAME = "story"
POLICIES, SIZES = ("tova",), (256, 512, 1024)

Policies = Annotated[
    list[str] | None,
    Option("--policy", help="Eviction policy; repeat for more. The full model is always added.", show_default="tova"),
]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="States that each layer may hold; repeat for more.", show_default="256, 512, 1024"),
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
    for name in policies:
        value, budget = parse_policy(name)
        refuse_budget(
            budget, "stories are the full model's until the first eviction, which layers then have at other tokens"
        )
        for states in sizes:
            resolve(value, states)
    check_counts(2, stories=stories, max_new_tokens=max_new_tokens, batch=batch)
    if not 0 < temperature <= 100:
        raise UsageError(
            f"--temperature {as_typed(temperature)}: must be above 0, and at most 100; 0.01 is nearly greedy"
        )
    from msrnn.evaluation.cells import FULL_MODEL, grid
    from msrnn.evaluation.data.prompts import STORY, prompt_ids
    from msrnn.evaluation.environment import environment
    from msrnn.evaluation.tasks.story import CHECK, Stories, StorySettings, markdown, report_lines, table
    from msrnn.hf.generation import stop_tokens_of

    options.check()
    store = options.open_store(out, NAME, CHECK)
    decoder, tokenizer = options.load()
    chat = bool(tokenizer.chat_template) if chat is None else chat
    prompt = prompt_ids(tokenizer, STORY, chat)
    length = len(prompt) + max_new_tokens
    check_positions(decoder.config.get_text_config(decoder=True), length, "--max-new-tokens")
    settings = StorySettings(prompt, max_new_tokens, temperature, list(range(seed, seed + stories)))
    cells = list(dict.fromkeys([FULL_MODEL, *grid(policies, sizes, length).cells]))
    metadata = {"model": options.model_name, "chat": chat, **environment(decoder.device)}
    stop_tokens = stop_tokens_of(decoder, tokenizer)
    evaluation = Stories(decoder, tokenizer, settings, stop_tokens, store, batch, metadata)
    results, others = computed(evaluation, cells, options)
    lines = report_lines({**results, **others})
    title = f"{metadata['model']}, {stories:,} stories of at most {max_new_tokens:,} tokens"
    report = table(lines, title)
    show_tables([report])
    write_report(out, report, markdown(lines, title, {**evaluation.key, **evaluation.metadata}))
