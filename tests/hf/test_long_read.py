from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn import MultiState, MultiStateRNN
from msrnn.core.state_file import load_description
from msrnn.errors import UsageError
from msrnn.hf import long_read
from msrnn.hf.long_read import LongRead
from msrnn.recall import Recall
from tests.helpers.tiny import build, llama, tokens

IDS = tokens(1, 40)


@pytest.fixture(scope="module")
def rnn() -> MultiStateRNN:
    return MultiStateRNN(build(llama()), "tova", 8, block=10)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint is saved after every block."""
    monkeypatch.setattr(long_read, "SECONDS", 0.0)
    monkeypatch.setattr(long_read, "SHARE", 0)
    return tmp_path / "state.partial"


def unexpected(error: Exception) -> None:
    raise error


def interrupted(rnn: MultiStateRNN, ids: torch.Tensor, checkpoint: Path, after: int, start: Path | None = None) -> int:
    """Read until `after` tokens are read, then stop; how many are in the checkpoint."""
    reading = LongRead(ids, checkpoint, start)
    state = rnn.load_state(start) if start else rnn.state()

    def on_tokens(_: int) -> None:
        if reading.done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reading.run(rnn, state, on_tokens, unexpected)
    again = LongRead(ids, checkpoint, start)
    assert again.resume(rnn) is not None
    return again.done


def assert_same(one: MultiState, other: MultiState) -> None:
    assert one.seen.tolist() == other.seen.tolist()
    for a, b in zip(one.layers, other.layers, strict=True):
        assert a.position.sort().values.tolist() == b.position.sort().values.tolist()


def test_a_read_resumes_from_its_checkpoint(rnn: MultiStateRNN, checkpoint: Path) -> None:
    assert interrupted(rnn, IDS, checkpoint, after=30) == 20  # the block that was interrupted is not saved
    reading, counted = LongRead(IDS, checkpoint), list[int]()
    state = reading.resume(rnn)
    assert state is not None
    reading.run(rnn, state, counted.append, unexpected)
    assert (counted, reading.done) == ([10, 10], 40)
    whole = rnn.state()
    rnn.read(IDS, whole)
    assert_same(state, whole)


def test_without_a_checkpoint_there_is_nothing_to_resume(rnn: MultiStateRNN, checkpoint: Path) -> None:
    reading = LongRead(IDS, checkpoint)
    assert (reading.resume(rnn), reading.done) == (None, 0)


def test_a_checkpoint_of_another_read_is_refused(rnn: MultiStateRNN, checkpoint: Path, tmp_path: Path) -> None:
    rnn.state().save(tmp_path / "empty")
    interrupted(rnn, IDS, checkpoint, after=30)
    others = {
        "of another text": LongRead(IDS.flip(1), checkpoint),
        "more than the 10 to read": LongRead(IDS[:, :10], checkpoint),
        "began from another state": LongRead(IDS, checkpoint, tmp_path / "empty"),
    }
    for reason, reading in others.items():
        with pytest.raises(UsageError, match=reason):
            reading.resume(rnn)
    with pytest.raises(UsageError, match="was saved with size 8, and this model has size 9"):
        LongRead(IDS, checkpoint).resume(MultiStateRNN(build(llama()), "tova", 9))


def test_a_checkpoint_that_cannot_be_saved_does_not_stop_the_read(rnn: MultiStateRNN, checkpoint: Path) -> None:
    checkpoint.mkdir()
    errors: list[Exception] = []
    reading, state = LongRead(IDS, checkpoint), rnn.state()
    reading.run(rnn, state, lambda _: None, errors.append)
    assert (reading.done, len(errors)) == (40, 1)
    assert int(state.seen[0]) == 40


def test_a_text_is_read_with_recall(checkpoint: Path) -> None:
    rnn = MultiStateRNN(build(llama()), "tova", 8, block=10, recall=4, recall_while_reading=3)
    assert interrupted(rnn, IDS, checkpoint, after=20) == 18
    reading = LongRead(IDS, checkpoint)
    state = reading.resume(rnn)
    assert state is not None
    reading.run(rnn, state, lambda _: None, unexpected)
    recalled, plain = rnn.state(), rnn.state()
    rnn.read(IDS, recalled, recall_every=3)
    rnn.read(IDS, plain)
    found, expected, other = (made.layers[-1].archives[0].tensors()["keys"] for made in (state, recalled, plain))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, other, atol=1e-2)


@pytest.mark.parametrize("recall", [{}, {"recall": 4, "recall_while_reading": 3}], ids=["plain", "recall"])
def test_a_protected_text_is_protected_after_every_checkpoint(recall: dict[str, Any], checkpoint: Path) -> None:
    rnn = MultiStateRNN(build(llama()), "tova", 24, block=5, **recall)
    ids, more = IDS[:, :20], tokens(1, 30, seed=5)
    reading = LongRead(ids, checkpoint, protect=True)
    with pytest.raises(KeyboardInterrupt):
        reading.run(rnn, rnn.state(), lambda _: _stop(reading.done > 10), unexpected)
    again = LongRead(ids, checkpoint, protect=True)
    state = again.resume(rnn)
    assert state is not None
    assert state.protected == [[(0, again.done)]]
    again.run(rnn, state, lambda _: None, unexpected)
    assert state.protected == [[(0, 20)]]
    whole = rnn.state()
    rnn.read(ids, whole, protect=True, recall_every=rnn.recall_while_reading)
    for one in (state, whole):
        rnn.read(more, one)
    assert_same(state, whole)
    assert {*range(20)} <= {*state.positions(0).flatten().tolist()}


def _stop(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


def test_a_checkpoint_is_protected_as_the_read_is(rnn: MultiStateRNN, checkpoint: Path) -> None:
    interrupted(rnn, IDS, checkpoint, after=30)
    with pytest.raises(UsageError, match="its tokens are not protected"):
        LongRead(IDS, checkpoint, protect=True).resume(rnn)
    reading = LongRead(IDS[:, :6], checkpoint, protect=True)
    rnn.state().save(checkpoint, {**reading.notes(6, rnn)})
    with pytest.raises(UsageError, match="its tokens are protected"):
        LongRead(IDS[:, :6], checkpoint).resume(rnn)


def recalling(while_reading: int | None, **options: Any) -> MultiStateRNN:
    recall = Recall(4, **options)
    return MultiStateRNN(build(llama()), "tova", 8, block=10, recall=recall, recall_while_reading=while_reading)


@pytest.mark.parametrize(
    ("before", "now", "options", "reason"),
    [
        (3, None, {}, "with recall_while_reading 3, not None"),
        (None, 3, {}, "with recall_while_reading None, not 3"),
        (3, 5, {}, "with recall_while_reading 3, not 5"),
        (3, 3, {"search": "int8"}, "with search 'auto', not 'int8'"),
        (3, 3, {"limit": 10**7}, "with archive_bytes None, not 10000000"),
        (3, 3, {"archive": "device", "every": 7}, None),
        (None, None, {"search": "int8"}, None),
    ],
)
def test_a_checkpoint_recalls_as_the_read_does(
    before: int | None, now: int | None, options: dict[str, Any], reason: str | None, checkpoint: Path
) -> None:
    assert interrupted(recalling(before), IDS, checkpoint, after=20) > 0
    with pytest.raises(UsageError, match=reason) if reason else nullcontext():
        assert LongRead(IDS, checkpoint).resume(recalling(now, **options)) is not None


def test_a_checkpoint_without_a_note_of_recall_read_without_it(checkpoint: Path) -> None:
    """As an earlier version wrote it."""
    rnn = recalling(None)
    interrupted(rnn, IDS, checkpoint, after=20)
    assert load_description(checkpoint)["notes"].keys() == {"read", "text", "begun"}


def test_more_than_fit_are_refused_before_a_token_is_read(rnn: MultiStateRNN, checkpoint: Path) -> None:
    state = rnn.state()
    with pytest.raises(UsageError, match="40 tokens: 7 fit"):
        LongRead(IDS, checkpoint, protect=True).run(rnn, state, lambda _: None, unexpected)
    assert (int(state.seen[0]), state.protected) == (0, [[]])
