"""States whose sequences hold fewer KV rows than the RNN's size: the same answers as with an RNN of that size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import msrnn
from msrnn.core.state_file import load_description, save_tensors
from msrnn.errors import UsageError
from msrnn.policy import NAMES, Policy
from tests.helpers.scored_policies import as_function
from tests.helpers.tiny import FAMILIES, build, llama, tokens

SIZES = [24, 16, 9]  # of the sequences; the first is the RNN's
HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
POLICIES: list[Any] = [*NAMES, "tova+2~45", Policy(0.9, "head", 1, 0.25)]


def make_batch(rnn: msrnn.MultiStateRNN) -> msrnn.MultiState:
    """A state of three empty sequences, of the sizes above."""
    return msrnn.MultiState.cat([rnn.state(size=size) for size in SIZES])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_answers_are_those_of_a_model_of_the_size(policy: Any, device: str) -> None:
    model, ids = build(llama(), device), tokens(3, 70).to(device)
    rnn = msrnn.MultiStateRNN(model, policy, SIZES[0], chunk=16, block=33)
    together = rnn.generate(ids, make_batch(rnn), **HOW)
    answers = set()
    for i, size in enumerate(SIZES):
        alone = msrnn.MultiStateRNN(model, policy, size, chunk=16, block=33)
        assert torch.equal(together[i], alone.generate(ids[i : i + 1], **HOW)[0])
        answers.add(tuple(alone.generate(ids[:1], **HOW)[0].tolist()))
    assert len(answers) > 1, "a text whose answers do not depend on the size shows nothing"


def test_a_policy_with_a_function() -> None:
    model, ids, policy = build(llama()), tokens(1, 40), as_function(Policy.parse("h2o"))
    rnn, alone = (msrnn.MultiStateRNN(model, policy, size) for size in (24, 9))
    assert torch.equal(rnn.generate(ids, rnn.state(size=9), **HOW), alone.generate(ids, **HOW))


@pytest.mark.parametrize(("state_dtype", "positions"), [("int8", "original"), (None, "compressed")])
def test_rows_in_8_bits_and_tokens_that_move(state_dtype: str | None, positions: str) -> None:
    model, ids = build(llama()), tokens(3, 60)
    options: Any = {"state_dtype": state_dtype, "positions": positions}
    rnn = msrnn.MultiStateRNN(model, "echo", SIZES[0], **options)
    together = rnn.generate(ids, make_batch(rnn), **HOW)
    for i, size in enumerate(SIZES):
        alone = msrnn.MultiStateRNN(model, "echo", size, **options)
        assert torch.equal(together[i], alone.generate(ids[i : i + 1], **HOW)[0])


def test_recall_has_the_guests_of_the_rnn() -> None:
    model, ids = build(llama(4, 2)), tokens(3, 60)
    rnn = msrnn.MultiStateRNN(model, "tova", SIZES[0], recall=8, recall_every=4)
    together = rnn.generate(ids, make_batch(rnn), **HOW)
    for i, size in enumerate(SIZES):
        alone = msrnn.MultiStateRNN(model, "tova", size, recall=8, recall_every=4)
        assert torch.equal(together[i], alone.generate(ids[i : i + 1], **HOW)[0])
    moving = msrnn.MultiStateRNN(model, "tova", SIZES[0], recall=8, positions="compressed")
    with pytest.raises(UsageError, match="re-rotated"):
        moving.state(size=9)


def test_layers_that_slide_keep_their_window() -> None:
    """Beside layers without a window, which have the size."""
    model, ids = build(FAMILIES["gemma2"]()), tokens(1, 60)
    rnn = msrnn.MultiStateRNN(model, "tova", 24)
    windows = [size for size in rnn.spec.sizes if size != 24]
    assert windows
    least = windows[0] or 0
    alone = msrnn.MultiStateRNN(model, "tova", least + 3)
    assert torch.equal(rnn.generate(ids, rnn.state(size=least + 3), **HOW), alone.generate(ids, **HOW))
    with pytest.raises(UsageError, match=f"at least {least}"):
        rnn.state(size=least - 1)


@pytest.mark.parametrize("recall", [0, 8])
def test_saved_forked_and_selected_states_keep_their_sizes(recall: int, tmp_path: Path) -> None:
    model, ids = build(llama(4, 2)), tokens(3, 50)
    rnn = msrnn.MultiStateRNN(model, "echo", SIZES[0], recall=recall, recall_every=8 if recall else 1)
    state = make_batch(rnn)
    rnn.read(ids, state)
    state.save(tmp_path / "state.safetensors")
    loaded = rnn.load_state(tmp_path / "state.safetensors")
    more = tokens(3, 30, seed=5)
    kinds = [loaded, msrnn.MultiState.cat([state.select([i]) for i in range(3)]), state]
    first, *others = (rnn.generate(more, kind, **HOW) for kind in kinds)
    assert all(torch.equal(first, other) for other in others)
    for i, size in enumerate(SIZES):
        alone = msrnn.MultiStateRNN(model, "echo", size, recall=recall, recall_every=8 if recall else 1)
        own = alone.state()
        alone.read(ids[i : i + 1], own)
        assert torch.equal(first[i], alone.generate(more[i : i + 1], own, **HOW)[0])


def test_a_file_names_a_size_that_fits(tmp_path: Path) -> None:
    rnn, path = msrnn.MultiStateRNN(build(llama()), "tova", 24), tmp_path / "state.safetensors"
    state = rnn.state(2, size=9)
    rnn.read(tokens(2, 30), state)
    rnn.state(1).save(tmp_path / "whole.safetensors")
    assert "own_sizes" not in load_file(tmp_path / "whole.safetensors")
    state.save(path)
    about = load_description(path)
    found = load_file(path)
    assert found["own_sizes"].tolist() == [9, 9]
    for wrong, message in (
        (torch.tensor([25, 9], dtype=torch.int32), "at most 24"),
        (torch.tensor([9, -1], dtype=torch.int32), "at least 1"),
        (torch.tensor([9, 8], dtype=torch.int32), "no slot is free"),
        (torch.tensor([9, 0], dtype=torch.int32), "too few"),
        (torch.tensor([9], dtype=torch.int32), "own_sizes"),
        (torch.tensor([9, 9]), "own_sizes"),
    ):
        save_tensors(path, {**found, "own_sizes": wrong}, about)
        with pytest.raises(UsageError, match=message):
            rnn.load_state(path)


def test_protected_tokens_count_against_the_own_size() -> None:
    model, ids = build(llama()), tokens(1, 40)
    rnn, alone = (msrnn.MultiStateRNN(model, "window+2", size) for size in (24, 9))
    states = rnn.state(size=9), alone.state()
    for which, state in zip((rnn, alone), states, strict=True):
        which.read(ids[:, :4], state, protect=True)
        which.read(ids[:, 4:], state)
        with pytest.raises(UsageError, match="4 fit; of 9 KV rows"):
            which.read(tokens(1, 5), state, protect=True)
    assert torch.equal(rnn.generate(ids, states[0], **HOW), alone.generate(ids, states[1], **HOW))
    with pytest.raises(UsageError, match="8 fit; of 9 KV rows"):
        rnn.spec.check_protect(9, 9)
    rnn.spec.check_protect(9)


def test_a_conversion_keeps_it() -> None:
    model, ids = build(llama()), tokens(1, 40)
    rnn, longer = (
        msrnn.MultiStateRNN(model, "tova", 24),
        msrnn.MultiStateRNN(model, "tova+1~96", 24, positions="compressed"),
    )
    alone = msrnn.MultiStateRNN(model, "tova", 9), msrnn.MultiStateRNN(model, "tova+1~96", 9, positions="compressed")
    state, own = rnn.state(size=9), alone[0].state()
    rnn.read(ids, state)
    alone[0].read(ids, own)
    more = tokens(1, 30, seed=2)
    expected = alone[1].generate(more, alone[1].convert_state(own), **HOW)
    assert torch.equal(longer.generate(more, longer.convert_state(state), **HOW), expected)


def test_what_a_state_cannot_be_is_refused() -> None:
    model = build(llama())
    rnn = msrnn.MultiStateRNN(model, "tova", 24)
    for wrong in (25, 0, -1, 1.5, True):
        with pytest.raises(UsageError, match="size"):
            rnn.state(size=wrong)  # type: ignore[arg-type]
    state = rnn.state(size=24)
    rnn.read(tokens(1, 3), state)
    with pytest.raises(UsageError, match="only an empty state"):
        state.limit_size(9)
    for size in ([24, 16], [24, None], "20:upper"):
        with pytest.raises(UsageError, match="not one size"):
            msrnn.MultiStateRNN(model, "tova", size).state(size=9)
    with pytest.raises(UsageError, match="not one size"):
        msrnn.MultiStateRNN(model, "full").state(size=9)


@pytest.mark.parametrize("recall", [0, 5])
def test_a_state_that_is_reset_keeps_its_size(recall: int) -> None:
    model, ids = build(llama()), tokens(1, 40)
    rnn, alone = (msrnn.MultiStateRNN(model, "echo", size, recall=recall) for size in (24, 9))
    state, expected = rnn.state(size=9), alone.read(ids, alone.state())
    for _ in range(2):
        torch.testing.assert_close(rnn.read(ids, state), expected)
        assert int((state.positions(0) >= 0).sum()) == 9
        state.reset()
    state.limit_size(16)
    rnn.read(ids, state)
    assert int((state.positions(0) >= 0).sum()) == 16
