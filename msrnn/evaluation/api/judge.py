"""A judge's verdicts on pairs of stories: a bounded model's and the full model's of the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msrnn.checks import check_count
from msrnn.errors import FileError
from msrnn.evaluation.api.common import Folder, open_store
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks import story
from msrnn.evaluation.tasks.judge import CHECK, Cost, Judgement
from msrnn.evaluation.tasks.judge_models import Judge
from msrnn.evaluation.tasks.judge_report import NAME, Line, figure, markdown, report_lines, table
from msrnn.evaluation.tasks.story_pairs import pairs

Stories = EvaluationResult[Any] | Store | str | Path


def judge(
    stories: Stories,
    by: Judge,
    *,
    max_requests: int | None = None,
    folder: Folder = None,
    progress: Progress | None = None,
) -> EvaluationResult[list[Line]]:
    """Compare the stories of a bounded model with the full model's of the same seed, by a judge.

    Each pair is shown twice, in both orders; it is a win or a loss only if both answers agree, otherwise a tie. An
    answer that cannot be parsed is requested once more, then counted separately. Pairs in which nothing was evicted are
    dropped.

    stories       the result of `stories`, or the folder that its records were kept in
    by            `EndpointJudge(name, base_url)`, or `LocalJudge(name, model, tokenizer)`
    max_requests  that this call makes, at most; the table has the pairs that are judged by then. None: as needed
    folder        keep the answers in FOLDER/judge.jsonl, so that another call reuses them; None: nowhere
    """
    judgement = prepare_judgement(stories, by, max_requests, folder, progress or Progress())
    judgement.judge_all(progress)
    lines = report_lines(judgement.verdicts(), judgement.leanings(), judgement.pairs.dropped)
    facts = {"judge": by.name, **judgement.pairs.facts, **environment(by.device)}
    title = f"{facts['model']}, judged by {by.name}"
    return EvaluationResult(
        lines,
        [table(lines, title)],
        judgement.records,
        facts,
        markdown(lines, title, facts),
        lambda to: figure(lines, to, title),
        left_out=len(judgement.store.records) - len(judgement.store.matching(by.key)),
    )


def judge_cost(stories: Stories, by: Judge, *, folder: Folder = None, progress: Progress | None = None) -> Cost:
    """Estimate what `judge` has left to ask: its requests, and the tokens to read and to write. Nothing is asked."""
    told = progress or Progress()
    judgement = prepare_judgement(stories, by, None, folder, told)
    told.resumed(*judgement.count_done(), judgement.unit)
    return judgement.cost()


def prepare_judgement(
    stories: Stories, by: Judge, max_requests: int | None, folder: Folder, told: Progress
) -> Judgement:
    """The pairs of the newest stories, and the answers that the folder has."""
    if max_requests is not None:
        check_count("max_requests", max_requests)
    found = pairs(read_stories(stories))
    dropped = sum(found.dropped.values())
    told.note(f"{len(found.pairs):,} pairs; {dropped:,} more, in which nothing was evicted, are dropped")
    return Judgement(by, found, open_store(folder, NAME, CHECK), max_requests)


def read_stories(stories: Stories) -> Store:
    if isinstance(stories, Store):
        return stories
    if isinstance(stories, EvaluationResult):
        store = Store(None)
        store.records.extend(stories.records)
        return store
    path = Path(stories) / f"{story.NAME}.jsonl"
    if not path.is_file():
        raise FileError("no such file", path, advice="generate stories first")
    return Store(path, story.CHECK)
