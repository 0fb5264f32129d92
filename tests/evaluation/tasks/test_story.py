from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch
from characters import character_tokenizer
from tiny import build, llama
from transformers import PreTrainedModel

from msrnn.evaluation.batch_generation import generate_batch
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.runner import Progress
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks import story as task
from msrnn.evaluation.tasks.story import (
    GumbelSampler,
    Results,
    Stories,
    StorySettings,
    evicted,
    markdown,
    repeated,
    report_lines,
    table,
)
from msrnn.hf.rnn import MultiStateRNN

TOKENIZER = character_tokenizer()
PROMPT = [1, 50, 60, 70]
FULL, TOVA, ROOMY = Cell("full", None), Cell("tova", 12), Cell("tova", 60)
CELLS = [FULL, TOVA, Cell("window", 12), ROOMY]
SETTINGS = StorySettings(PROMPT, 40, 1.5, [3, 4, 5, 6, 7])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(vocab_size=len(TOKENIZER)))


def generated(
    model: PreTrainedModel, store: Store, cells: list[Cell], batch: int = 5, settings: StorySettings = SETTINGS
) -> Results:
    return Stories(model, TOKENIZER, settings, {2}, store, batch, {"model": "tiny"}).results(cells)


def test_noise_is_a_sample_of_the_softmax() -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0]])
    noise = GumbelSampler([0], temperature=2.0)
    counts = Counter(int(noise(logits, [0])) for _ in range(4000))
    for token, share in enumerate((logits[0] / 2).softmax(-1).tolist()):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)


def test_noise_depends_on_the_seed_alone() -> None:
    logits = torch.randn(6, 3, 50, generator=torch.Generator().manual_seed(0))
    together, alone, other = GumbelSampler([7, 8, 9], 1.0), GumbelSampler([8], 1.0), GumbelSampler([8], 1.0)
    rows = [together(step, [0, 1, 2])[1].item() for step in logits]
    assert rows == [alone(step[1:2], [0]).item() for step in logits]
    assert rows != [other(step[1:2] * 0, [0]).item() for step in logits]
    fewer = GumbelSampler([7, 8, 9], 1.0)
    first = [fewer(step, [0, 1, 2])[1].item() for step in logits[:3]]
    assert rows == first + [fewer(step[1:], [1, 2])[0].item() for step in logits[3:]]


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


@pytest.mark.parametrize("cell", CELLS[1:], ids=lambda cell: cell.label)
def test_what_is_copied_is_what_would_have_been_generated(model: PreTrainedModel, cell: Cell) -> None:
    """Every version from its first token on, alone, in a state of its own."""
    stories = generated(model, Store(None), [FULL, cell])[cell]
    rnn = MultiStateRNN(model, cell.policy, cell.size)
    for story in stories:
        (alone,) = generate_batch(
            rnn, [PROMPT], {2}, SETTINGS.max_new_tokens, GumbelSampler([story["seed"]], SETTINGS.temperature)
        )
        assert story["ids"] == alone


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


def test_what_was_killed_goes_on(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generated(model, Store(None), CELLS[:2], batch=2)
    original, seeds = task.generate_batch, list[int]()

    def counted(*arguments: object, **named: object) -> object:
        seeds.append(len(arguments[1]))  # type: ignore[arg-type]
        if len(seeds) == 5:
            raise KeyboardInterrupt
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(task, "generate_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        generated(model, Store(tmp_path / "x.jsonl"), CELLS[:2], batch=2)
    rows = (tmp_path / "x.jsonl").read_text().splitlines(keepends=True)
    assert len(rows) == 7
    (tmp_path / "x.jsonl").write_text("".join(rows[:-1]))  # killed between two rows of a batch
    store = Store(tmp_path / "x.jsonl")
    found = generated(model, store, CELLS[:2], batch=2)
    assert {c: [s["ids"] for s in found[c]] for c in found} == {c: [s["ids"] for s in expected[c]] for c in expected}
    assert seeds == [2, 2, 1, 2, 2, 2, 2]
    assert len(store.rows) == 10
    total = list[int]()
    Stories(model, TOKENIZER, SETTINGS, {2}, store, 2, {}).results(CELLS[:2], Progress(total.append))
    assert total == [0]
    generated(model, store, [FULL], settings=SETTINGS._replace(temperature=1.0))
    assert len(store.rows) == 15


def story(length: int, ended: bool, size: int | None = 12, word: int = 7) -> dict[str, object]:
    return {"ids": [word] * length, "story": "a b", "ended": ended, "size": size, "prompt_tokens": 4}


def test_the_numbers_of_stories() -> None:
    assert [evicted(story(n, ended)) for n, ended in ((8, True), (9, True), (9, False), (10, False))] == [0, 1, 0, 1]
    assert not evicted(story(100, True, None))
    whole = [story(8, True, None), story(40, False, None), story(20, True, None)]
    bounded = [story(8, True), story(40, False, word=9), story(15, True)]
    found = report_lines({FULL: whole, TOVA: bounded})
    assert (found[1].stories, found[1].ended, found[1].evicted, found[1].same) == (3, 2, 2, 1)
    assert found[1].tokens.value == pytest.approx(21)
    text = markdown(found, "a model", {"torch": "2"})
    assert "| tova 12 | 21 · 8 to 40 | 2 · 2 to 2 | 0.0% · 0.0% to 0.0% | 2 of 3 | 2 of 3 | 1 of 3 |" in text
    assert [line["forgot"] for line in csv.DictReader(table(found, "").csv().splitlines())] == ["0", "2"]


def test_what_a_story_repeats() -> None:
    assert repeated("a b c d e") == 0
    assert repeated("a b") == 0
    assert repeated("Once upon a time once upon a time once upon a time") == pytest.approx(5 / 9)
