from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.engine.decode_batch import DecodeBatch
from msrnn.engine.noise import uniform
from msrnn.errors import UsageError
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.runner import Progress, Runner
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.story import (
    SAMPLER,
    Results,
    Stories,
    StorySettings,
    has_evictions,
    markdown,
    measure_repetition,
    report_lines,
    table,
)
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.characters import character_tokenizer
from tests.helpers.tiny import build, llama

TOKENIZER = character_tokenizer()
PROMPT = [1, 50, 60, 70]
FULL, TOVA, ROOMY = Cell("full", None), Cell("tova", 12), Cell("tova", 60)
CELLS = [FULL, TOVA, Cell("window", 12), ROOMY]
SETTINGS = StorySettings(PROMPT, 40, 1.5, [3, 4, 5, 6, 7])
STOPS = {2, 30}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(vocab_size=len(TOKENIZER)))


def generated(
    model: PreTrainedModel,
    store: Store,
    cells: list[Cell],
    batch: int | None = 5,
    settings: StorySettings = SETTINGS,
    progress: Progress | None = None,
) -> Results:
    task = Stories(model, TOKENIZER, settings, STOPS, {"model": "tiny"})
    return Runner(task, store, model, batch).results(cells, progress)


def ids_of(stories: Results) -> dict[Cell, list[list[int]]]:
    return {cell: [story["ids"] for story in some] for cell, some in stories.items()}


def parting(ids: list[int], others: list[int]) -> int | None:
    """The first token at which two stories differ; None: they do not."""
    if ids == others:
        return None
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ids), len(others)))


def test_versions_part_only_once_something_was_forgotten(model: PreTrainedModel) -> None:
    stories = generated(model, Store(None), CELLS)
    whole = stories[FULL]
    assert [story["ids"] for story in stories[ROOMY]] == [story["ids"] for story in whole]
    assert len({tuple(story["ids"]) for story in whole}) == 5
    first = SETTINGS.first_affected(12)
    assert first == 10
    parted = [parting(a["ids"], b["ids"]) for cell in CELLS[1:3] for a, b in zip(stories[cell], whole, strict=True)]
    assert any(at is not None for at in parted)
    assert all(at is None or at >= first for at in parted)
    assert min(at for at in parted if at is not None) < 25, "it is forgetting that tells them apart"


@torch.no_grad()
def alone(rnn: MultiStateRNN, seed: int) -> list[int]:
    """A story token by token: the first token at which the summed probabilities exceed its noise."""
    state, ids = rnn.state(), list[int]()
    logits = rnn.read(torch.tensor([PROMPT]), state)[0, -1]
    while len(ids) < SETTINGS.max_new_tokens:
        summed = (logits.float() / SETTINGS.temperature).softmax(-1).cumsum(-1)
        token = int((summed > uniform(seed, len(ids)) * summed[-1]).nonzero()[0])
        if token in STOPS:
            break
        ids.append(token)
        logits = rnn.step(torch.tensor([[token]]), state)[0, -1]
    return ids


@pytest.mark.parametrize("cell", CELLS[1:], ids=lambda cell: cell.label)
def test_what_is_copied_is_what_would_have_been_generated(model: PreTrainedModel, cell: Cell) -> None:
    """Every version from its first token on, alone, in a state of its own."""
    stories = generated(model, Store(None), [FULL, cell])[cell]
    rnn = MultiStateRNN(model, cell.policy, cell.size)
    for story in stories:
        assert story["ids"] == alone(rnn, story["seed"])


def test_a_size_below_the_prompt_takes_nothing_over(model: PreTrainedModel) -> None:
    settings = SETTINGS._replace(prompt=list(range(20, 50)))
    stories = generated(model, Store(None), [FULL, TOVA], settings=settings)
    assert settings.first_affected(12) == 0
    assert {story["taken_over"] for story in stories[TOVA]} == {0}
    assert stories[TOVA][0]["ids"] != stories[FULL][0]["ids"]


def test_a_story_is_the_same_in_any_batch(model: PreTrainedModel) -> None:
    together = generated(model, Store(None), [FULL, TOVA])[TOVA]
    alone = generated(model, Store(None), [FULL, TOVA], batch=1)[TOVA]
    other = generated(model, Store(None), [FULL, TOVA], settings=SETTINGS._replace(seeds=[6, 2]))[TOVA]
    assert [story["ids"] for story in together] == [story["ids"] for story in alone]
    assert other[0]["ids"] == together[3]["ids"]


def failing(monkeypatch: pytest.MonkeyPatch, steps: int, error: BaseException) -> list[int]:
    """Let one step of all decode batches fail, after some; returns the rows that each engine has."""
    original, capacities, done = DecodeBatch.step, list[int](), list[int]()

    def step(self: DecodeBatch, count: int) -> object:
        if not capacities or capacities[-1] != self.slots:
            capacities.append(self.slots)
        done.append(count)
        if len(done) == steps:
            raise error
        return original(self, count)

    monkeypatch.setattr(DecodeBatch, "step", step)
    return capacities


def test_what_was_killed_goes_on(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, cells = ids_of(generated(model, Store(None), CELLS[:2], batch=2)), CELLS[:2]
    with monkeypatch.context() as patch:
        failing(patch, 70, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            generated(model, Store(tmp_path / "x.jsonl"), cells, batch=2)
    rows = (tmp_path / "x.jsonl").read_text().splitlines(keepends=True)
    assert 2 <= len(rows) < 5, "the stories that were finished"
    store = Store(tmp_path / "x.jsonl")
    total, read = list[int](), list[int]()
    found = generated(model, store, cells, 2, progress=Progress(total.append, tokens=read.append))
    assert ids_of(found) == expected
    assert len(store.records) == 10
    assert sum(read) == total[0] == (10 - len(rows)) * (len(PROMPT) + SETTINGS.max_new_tokens)
    generated(model, store, cells, progress=Progress(total.append))
    assert total[1:] == [0]
    generated(model, store, [FULL], settings=SETTINGS._replace(temperature=1.0))
    assert len(store.records) == 15


def test_fewer_stories_at_once_where_memory_runs_out(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle: stories that were finished are not generated again, and all are the same."""
    expected, store = ids_of(generated(model, Store(None), CELLS[:2])), Store(None)
    total, read = list[int](), list[int]()
    capacities = failing(monkeypatch, 30, torch.OutOfMemoryError("CUDA out of memory"))
    found = generated(model, store, CELLS[:2], None, progress=Progress(total.append, tokens=read.append))
    assert ids_of(found) == expected
    assert len(store.records) == 10
    assert capacities == [5, 2, 5]
    assert sum(read) == total[0]


def test_a_batch_that_was_asked_for_is_not_made_smaller(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 30, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(UsageError, match="batch=5: full does not fit into memory; results so far are kept"):
        generated(model, Store(None), [FULL])


def test_stories_of_the_sampler_before_are_not_used(model: PreTrainedModel) -> None:
    store = Store(None)
    generated(model, store, [FULL])
    before = [{name: value for name, value in row.items() if name != SAMPLER} for row in store.records]
    old = Store(None)
    for row in before:
        old.append(row)
    generated(model, old, [FULL])
    assert len(old.records) == 10


def story(length: int, ended: bool, size: int | None = 12, word: int = 7) -> dict[str, object]:
    return {"ids": [word] * length, "story": "a b", "ended": ended, "size": size, "prompt_tokens": 4}


def test_the_numbers_of_stories() -> None:
    assert [has_evictions(story(n, ended)) for n, ended in ((8, True), (9, True), (9, False), (10, False))] == [
        0,
        1,
        0,
        1,
    ]
    assert not has_evictions(story(100, True, None))
    whole = [story(8, True, None), story(40, False, None), story(20, True, None)]
    bounded = [story(8, True), story(40, False, word=9), story(15, True)]
    found = report_lines({FULL: whole, TOVA: bounded})
    assert (found[1].stories, found[1].ended, found[1].evicted, found[1].same) == (3, 2, 2, 1)
    assert found[1].tokens.value == pytest.approx(21)
    text = markdown(found, "a model", {"torch": "2"})
    assert "| tova 12 | 21 · 8 to 40 | 2 · 2 to 2 | 0.0% · 0.0% to 0.0% | 2 of 3 | 2 of 3 | 1 of 3 |" in text
    assert [line["forgot"] for line in csv.DictReader(table(found, "").csv().splitlines())] == ["0", "2"]


def test_what_a_story_repeats() -> None:
    assert measure_repetition("a b c d e") == 0
    assert measure_repetition("a b") == 0
    assert measure_repetition("Once upon a time once upon a time once upon a time") == pytest.approx(5 / 9)
