"""Long stories of every version of a model, one per seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from msrnn.checks import check_count
from msrnn.errors import UsageError
from msrnn.evaluation.api.common import Folder, check_positions, decoder_config, model_name, open_store, result_of
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.cells import FULL_MODEL, check_lists, grid
from msrnn.evaluation.data.prompts import STORY, prompt_ids
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.tasks.story import CHECK, NAME, Line, Stories, StorySettings, markdown, report_lines, table
from msrnn.hf.stop_tokens import stop_tokens_of
from msrnn.policy import Policy
from msrnn.size import parse_policy, refuse_budget, resolve


def stories(
    model: PreTrainedModel,
    policies: Sequence[str | Policy] = ("tova",),
    sizes: Sequence[int] = (256, 512, 1024),
    *,
    tokenizer: Any,
    count: int = 100,
    max_new_tokens: int = 4096,
    temperature: float = 1.0,
    seed: int = 0,
    chat: bool | None = None,
    batch: int | None = None,
    folder: Folder = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> EvaluationResult[list[Line]]:
    """Generate stories with the full model, and with each policy at each size.

    Until its first eviction has an effect, a version writes the full model's story, so that part is copied.

    policies     policies or their names; the full model is always added
    sizes        KV rows per layer
    count        stories of each version; `seed` is the seed of the first, and the next ones count up from it
    temperature  of sampling, above 0
    chat         use the chat template; None: if there is one
    batch        stories generated at once; None: what suits the device
    folder       keep the records in FOLDER/story.jsonl, so that another call reuses them; None: nowhere
    about        facts that are written into every record, such as the name of the `model`
    """
    told = progress or Progress()
    check_versions(policies, sizes)
    check_count("count", count)
    check_count("max_new_tokens", max_new_tokens)
    check_temperature(temperature)
    store = open_store(folder, NAME, CHECK)
    chat = bool(tokenizer.chat_template) if chat is None else chat
    prompt = prompt_ids(tokenizer, STORY, chat)
    length = len(prompt) + max_new_tokens
    check_positions(decoder_config(model), length, told.note, "max_new_tokens")
    settings = StorySettings(prompt, max_new_tokens, temperature, list(range(seed, seed + count)))
    cells = list(dict.fromkeys([FULL_MODEL, *grid(policies, sizes, length).cells]))
    metadata = {"model": model_name(model), **(about or {}), "chat": chat, **environment(model.device)}
    task = Stories(model, tokenizer, settings, stop_tokens_of(model, tokenizer), metadata)
    run = Runner(task, store, model, batch, workers)
    results = run.results(cells, told)
    others = run.other_results(cells)
    lines = report_lines({**results, **others})
    title = f"{metadata['model']}, {count:,} stories of at most {max_new_tokens:,} tokens"
    page = markdown(lines, title, run.facts)
    return result_of(lines, [table(lines, title)], run.facts, page, None, run, list(results), list(others))


def check_versions(policies: Sequence[str | Policy], sizes: Sequence[int]) -> None:
    if policies:  # or the full model alone
        check_lists(policies, sizes)
    for name in policies:
        value, budget = parse_policy(name)
        refuse_budget(
            budget, "stories are the full model's until the first eviction, which layers then have at other tokens"
        )
        for size in sizes:
            resolve(value, size)


def check_temperature(temperature: float) -> None:
    if not 0 < temperature <= 100:
        raise UsageError(
            "must be above 0, and at most 100; 0.01 is nearly greedy", name="temperature", value=temperature
        )
