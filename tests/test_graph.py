from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, build, left_padded, llama, tokens

import msrnn
from msrnn.graph import capture

SETTINGS = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.parametrize("policy", ["tova", "h2o", "window+4"])
@pytest.mark.gpu
def test_a_replayed_step_is_the_step(policy: str) -> None:
    model = build(llama(eos_token_id=None), "cuda")
    ids, mask = left_padded(tokens(2, 20), [0, 6])
    graphed = msrnn.MultiStateRNN(model, policy, 9)
    plain = msrnn.MultiStateRNN(model, policy, 9, backend="torch")
    mine, theirs = graphed.state(2), plain.state(2)
    graphed.read(ids, mine, mask)
    plain.read(ids, theirs, mask)
    for token in tokens(2, 25, seed=3).split(1, dim=1):
        torch.testing.assert_close(graphed.step(token, mine), plain.step(token, theirs), atol=1e-4, rtol=1e-4)
    assert graphed._graph(mine) is not None
    assert torch.equal(mine.seen, theirs.seen)
    for layer in range(2):
        assert torch.equal(mine.positions(layer).sort(-1).values, theirs.positions(layer).sort(-1).values)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
@pytest.mark.gpu
def test_generate_replays(how: dict[str, int]) -> None:
    model = build(llama(eos_token_id=None), "cuda")
    ids, mask = left_padded(tokens(2, 20), [0, 6])
    expected = msrnn.MultiStateRNN(model, "tova", 9, backend="torch").generate(
        ids, attention_mask=mask, **SETTINGS, **how
    )
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    before = type(model)
    assert torch.equal(rnn.generate(ids, attention_mask=mask, **SETTINGS, **how), expected)
    assert type(model) is before
    assert not hasattr(model, "_graph")


@pytest.mark.gpu
def test_hidden_states_are_still_to_be_had() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(eos_token_id=None), "cuda"), "tova", 9)
    out = rnn.generate(tokens(1, 8), **SETTINGS, return_dict_in_generate=True, output_hidden_states=True)
    assert len(out.hidden_states) == 12
    assert out.hidden_states[-1][0].shape == (1, 1, 48)


@pytest.mark.gpu
def test_what_cannot_be_captured_is_said_and_runs() -> None:
    model = build(FAMILIES["mixtral"](), "cuda")
    ids = tokens(1, 20).split(1, dim=1)
    rnn, plain = (msrnn.MultiStateRNN(model, "tova", 9, backend=b) for b in ("auto", "torch"))
    mine, theirs = rnn.state(), plain.state()
    with pytest.warns(UserWarning, match="cannot be captured"):
        logits = [rnn.step(token, mine) for token in ids]
    expected = [plain.step(token, theirs) for token in ids]
    torch.testing.assert_close(torch.cat(logits), torch.cat(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_a_graph_goes_with_its_state() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), "cuda"), "tova", 9)
    state = rnn.state()
    rnn.step(tokens(1, 1), state)
    assert len(rnn._graphs) == 1
    del state
    assert len(rnn._graphs) == 0


def test_there_is_no_graph_where_there_is_no_gpu_or_no_bound() -> None:
    model = build(llama())
    for policy in ("tova", "full"):
        rnn = msrnn.MultiStateRNN(model, policy, 9)
        assert capture(model, rnn.plan, rnn.state()) is None
