"""Long stories by policy and size. With the same seed, all versions write the same story until something is evicted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.engine.engine import Engine
from msrnn.engine.offline import full_model_rnn
from msrnn.engine.requests import SamplingParams
from msrnn.evaluation import statistics
from msrnn.evaluation.cells import FULL_MODEL, Cell, cell_of
from msrnn.evaluation.environment import backend_names, model_key
from msrnn.evaluation.generation import answer_prompts
from msrnn.evaluation.report import Formatted, Table, document
from msrnn.evaluation.schemas import Schema, Text, check_of
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.store import Record
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.hf.rnn import MultiStateRNN

NAME = "story"


class StorySchema(Schema):
    policy: Text
    size: int | None
    seed: int
    ids: list[int]
    story: Text
    ended: bool
    prompt_tokens: int
    fingerprint: Text
    dtype: Text
    prompt: Text
    most: int
    temperature: float


CHECK = check_of(StorySchema)
HEADER = ("version", "tokens", "words", "repeated", "ended", "evicted", "as full")
NGRAM = 4  # words
SAMPLER = "sampler"  # records of earlier versions, whose stories were sampled in another way, do not have it


class StorySettings(NamedTuple):
    """The settings that all stories share."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float
    seeds: list[int]

    @property
    def key(self) -> Record:
        digest = hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:16]
        return {"prompt": digest, "most": self.max_new_tokens, "temperature": self.temperature, SAMPLER: "engine"}

    def params(self, seed: int, first: int, stop_tokens: Iterable[int]) -> SamplingParams:
        """For the rest of a story whose first tokens are there."""
        return SamplingParams(
            max_tokens=self.max_new_tokens - first,
            temperature=self.temperature,
            seed=seed,
            continued=first,
            stop_token_ids=sorted(stop_tokens),
            ignore_eos=True,  # the stop tokens are all of them
        )

    def first_affected(self, size: int) -> int:
        """The first token of a story, counted from 0, that an eviction can change.

        The token that causes the first eviction still attends to everything, so the next token is unaffected.
        """
        return max(0, size + 2 - len(self.prompt))


Results = dict[Cell, list[Record]]  # a story for each seed


class Stories(Task[Cell, int, Record]):
    """The stories of one model. An item is a seed.

    Until its first eviction has an effect, a version writes the full model's story: that part is copied.
    """

    unit = "stories"
    gpu_batch, cpu_batch = 50, 8

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, settings: StorySettings, stop_tokens: set[int], metadata: Record
    ) -> None:
        self.key, self.metadata = {**model_key(model), **settings.key}, metadata
        self.tokenizer, self.settings, self.stop_tokens = tokenizer, settings, stop_tokens
        self.columns = len(settings.prompt) + settings.max_new_tokens  # tokens of a prompt and its story

    def cell_of(self, record: Record) -> Cell:
        return cell_of(record)

    def items(self, cell: Cell) -> list[int]:
        return self.settings.seeds

    def read(self, records: list[Record]) -> dict[int, Record]:
        return {record["seed"]: record for record in records}

    def work(self, job: Job[Cell, int]) -> int:
        return len(job.items) * self.columns

    def needs(self, cell: Cell) -> list[Cell]:
        """All other versions begin with the full model's stories."""
        return [] if cell == FULL_MODEL else [FULL_MODEL]

    def batches(self, job: Job[Cell, int]) -> list[list[int]]:
        """Stories that are the full model's to their end come first: they need no computation."""
        copied = [seed for seed in job.items if self._is_unaffected(job, seed)]
        rest = [seed for seed in job.items if seed not in copied]
        return [some for some in (copied, rest) if some]

    def _is_unaffected(self, job: Job[Cell, int], seed: int) -> bool:
        """Whether the full model's story ends before an eviction can change it; the stop token counts as a token."""
        if job.cell.size is None:
            return False
        story = self._full_story(job, seed)
        return len(story["ids"]) + bool(story["ended"]) <= self.settings.first_affected(job.cell.size)

    def _full_story(self, job: Job[Cell, int], seed: int) -> Record:
        return self.read(job.done(FULL_MODEL))[seed]

    def prepare(self, job: Job[Cell, int], model: PreTrainedModel) -> Compute[int]:
        rnn = self._rnn(job.cell, model)
        first = 0 if job.cell.size is None else self.settings.first_affected(job.cell.size)
        backend = {"backend": backend_names(rnn)}

        def compute(seeds: list[int], on_tokens: OnTokens) -> Iterator[Record]:
            if self._is_unaffected(job, seeds[0]):
                for seed in seeds:
                    ids = self._full_story(job, seed)["ids"]
                    on_tokens(self.columns)
                    yield {**self._story(seed, ids), "taken_over": len(ids), **backend}
                return
            copied = [self._full_story(job, seed)["ids"][:first] if first else [] for seed in seeds]
            prompts = [self.settings.prompt + ids for ids in copied]
            params = [self.settings.params(seed, first, self.stop_tokens) for seed in seeds]
            for number, tokens, seconds in answer_prompts(Engine.offline(rnn, job.batch), prompts, params, on_tokens):
                cost = {"taken_over": first, "seconds": seconds, **backend}
                yield {**self._story(seeds[number], copied[number] + tokens), **cost}

        return compute

    def _rnn(self, cell: Cell, model: PreTrainedModel) -> MultiStateRNN:
        """The full model has slots for everything: the same attention kernels, in the same dtype."""
        if cell.size is None:
            return full_model_rnn(model, self.columns)
        return MultiStateRNN(model, **cell.options)

    def _story(self, seed: int, ids: list[int]) -> Record:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        length = {"ended": len(ids) < self.settings.max_new_tokens, "prompt_tokens": len(self.settings.prompt)}
        return {"seed": seed, "story": text, "ids": ids, **length}


class Line(NamedTuple):
    """The stories of one version in numbers."""

    cell: Cell
    stories: int
    tokens: Estimate
    words: Estimate
    repeated: Estimate
    ended: int  # with a stop token
    evicted: int  # something was evicted before the end
    same: int  # word for word the full model's


def report_lines(stories: Results) -> list[Line]:
    return [_line(cell, some, stories[FULL_MODEL]) for cell, some in stories.items()]


def _line(cell: Cell, stories: list[Record], full: list[Record]) -> Line:
    count = [1] * len(stories)
    return Line(
        cell,
        len(stories),
        statistics.mean([len(story["ids"]) for story in stories], count),
        statistics.mean([len(story["story"].split()) for story in stories], count),
        statistics.mean([measure_repetition(story["story"]) for story in stories], count),
        sum(story["ended"] for story in stories),
        sum(has_evictions(story) for story in stories),
        sum(one["ids"] == other["ids"] for one, other in zip(stories, full, strict=True)),
    )


def has_evictions(story: Record) -> bool:
    """Whether something was evicted. The last token of a story that did not end was never read."""
    read = story["prompt_tokens"] + len(story["ids"]) - (0 if story["ended"] else 1)
    return story["size"] is not None and read > story["size"]


def measure_repetition(story: str) -> float:
    """Of all runs of four words, the share that occurred earlier in the story."""
    words = story.lower().split()
    runs = list(zip(*(words[i:] for i in range(NGRAM)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def table(results: list[Line], title: str) -> Table:
    rows: list[list[Any]] = [
        [
            line.cell.label,
            *(Formatted(estimate, "{:,.0f}".format) for estimate in (line.tokens, line.words)),
            Formatted(line.repeated, "{:.1%}".format),
            *(f"{count} of {line.stories}" for count in (line.ended, line.evicted, line.same)),
        ]
        for line in results
    ]
    means = [f"{name}{end}" for name in ("tokens", "words", "repeated") for end in ("", "_low", "_high")]
    lines: list[list[Any]] = [["policy", "size", "stories", *means, "ended", "forgot", "same"]]
    lines += [[*line.cell, line.stories, *line.tokens, *line.words, *line.repeated, *line[5:]] for line in results]
    return Table(NAME, f"stories: {title}", "", HEADER, rows, lines)


def markdown(results: list[Line], title: str, facts: dict[str, Any]) -> str:
    about = (
        f"{title}. Means and their 95 % intervals, by bootstrap over the stories. Repeated: of all runs of four words, "
        "those that occurred earlier in the story. Evicted: stories in which something was evicted before the end."
    )
    return document("Stories", about, [table(results, title)], facts)
