from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import msrnn
from msrnn.core.slots import MOST_COLUMNS
from msrnn.hf.read_plan import Shape
from tests.helpers.tiny import FAMILIES, build, greedy, left_padded, llama, tokens

SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


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
    assert graphed._graphs.of(mine) is not None
    assert torch.equal(mine.seen, theirs.seen)
    for layer in range(2):
        assert torch.equal(mine.positions(layer).sort(-1).values, theirs.positions(layer).sort(-1).values)


@pytest.mark.parametrize("compiles", [True, False])
def test_short_reads_are_compiled_only_where_many_texts_follow(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rnn, asked = msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9, compile=compiles), list[bool]()
    graphs, state = rnn._graphs, rnn.state()
    graphs.possible = True
    monkeypatch.setattr(graphs, "_capture", lambda *args: asked.append(args[3]))
    graphs.of(state, Shape(16, 16), rest=True)
    graphs.of(state, Shape(512, 512))
    with rnn.compiling_rests():
        graphs.of(state, Shape(32, 32), rest=True)
    graphs.of(state, Shape(64, 64), rest=True)
    assert asked == [False, compiles, compiles, False]


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
@pytest.mark.gpu
def test_generate_replays(how: dict[str, Any]) -> None:
    model = build(llama(eos_token_id=None), "cuda")
    ids, mask = left_padded(tokens(2, 20), [0, 6])
    expected = msrnn.MultiStateRNN(model, "tova", 9, backend="torch").generate(
        ids, attention_mask=mask, **SETTINGS, **how
    )
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    before = type(model), type(model).forward, set(vars(model))
    assert torch.equal(rnn.generate(ids, attention_mask=mask, **SETTINGS, **how), expected)
    assert rnn._graphs._buffers, "nothing was captured, so nothing was replayed"
    assert (type(model), type(model).forward, set(vars(model))) == before, "the model itself was changed"


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
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph"):
        logits = [rnn.step(token, mine) for token in ids]
    expected = [plain.step(token, theirs) for token in ids]
    torch.testing.assert_close(torch.cat(logits), torch.cat(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("policy", "positions"),
    [("tova", "original"), ("h2o", "original"), ("window+4", "compact"), ("echo", "compressed")],
)
@pytest.mark.parametrize("last_only", [True, False])
def test_blocks_that_are_replayed_are_the_blocks(policy: str, positions: str, last_only: bool) -> None:
    model = build(llama(), "cuda")
    ids, mask = left_padded(tokens(3, 83), [0, 6, 19])
    graphed = msrnn.MultiStateRNN(model, policy, 9, chunk=7, block=16, positions=positions)
    plain = msrnn.MultiStateRNN(model, policy, 9, backend="torch", positions=positions)
    mine, theirs = graphed.state(3), plain.state(3)
    for _ in range(2):
        logits = graphed.read(ids, mine, mask, last_only)
        torch.testing.assert_close(logits, plain.read(ids, theirs, mask, last_only), atol=1e-4, rtol=1e-4)
    for layer in range(2):
        assert torch.equal(mine.positions(layer).sort(-1).values, theirs.positions(layer).sort(-1).values)


@pytest.mark.gpu
def test_states_of_one_batch_size_share_a_graph() -> None:
    model = build(llama(), "cuda")
    rnn, plain = msrnn.MultiStateRNN(model, "h2o", 9), msrnn.MultiStateRNN(model, "h2o", 9, backend="torch")
    mine, theirs = [rnn.state(2) for _ in range(3)], [plain.state(2) for _ in range(3)]
    graphs = set()
    for i, token in enumerate(tokens(2, 24).split(1, dim=1)):
        torch.testing.assert_close(rnn.step(token, mine[i % 3]), plain.step(token, theirs[i % 3]), atol=1e-4, rtol=1e-4)
        graphs.add(rnn._graphs.of(mine[i % 3]))
    assert len(graphs) == 1


@pytest.mark.gpu
def test_generate_captures_once_per_batch_size() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(eos_token_id=None), "cuda"), "tova", 9)
    first = rnn.generate(tokens(2, 20), **SETTINGS)
    buffers = dict(rnn._graphs._buffers)
    assert torch.equal(rnn.generate(tokens(2, 20), **SETTINGS), first)
    assert rnn._graphs._buffers == buffers
    state = rnn.state(2)
    assert torch.equal(rnn.generate(tokens(2, 20), state=state, **SETTINGS), first)
    assert torch.equal(state.seen.cpu(), torch.tensor([32, 32]))


@pytest.mark.gpu
def test_a_new_state_moves_in_where_another_has_gone() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), "cuda"), "tova", 9)
    state = rnn.state()
    expected = rnn.step(tokens(1, 1), state)
    graph = rnn._graphs.of(state)
    del state
    state = rnn.state()
    assert torch.equal(rnn.step(tokens(1, 1), state), expected)
    assert rnn._graphs.of(state) is graph
    rnn.state(2)
    assert rnn._graphs.of(state) is graph, "torn down while a state lived there"
    del state
    rnn.state(2)
    assert not rnn._graphs._buffers


@pytest.mark.gpu
def test_a_loaded_state_is_replayed_like_any_other(tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), "cuda"), "tova", 9)
    state = rnn.state()
    rnn.read(tokens(1, 20), state)
    state.save(tmp_path / "state")
    expected = [rnn.step(token, state) for token in tokens(1, 3).split(1, dim=1)]
    del state
    loaded = rnn.load_state(tmp_path / "state")
    for token, logits in zip(tokens(1, 3).split(1, dim=1), expected, strict=True):
        torch.testing.assert_close(rnn.step(token, loaded), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("policy", "where"), [("tova", "cpu"), pytest.param("full", "cuda", marks=pytest.mark.gpu)], ids=["CPU", "no bound"]
)
def test_there_is_no_graph_where_there_is_no_gpu_or_no_bound(policy: str, where: str) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), where), policy, 9)
    assert rnn._graphs.of(rnn.state()) is None


def test_why_nothing_was_captured_is_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class GivenUp:
        def __init__(self, *args: object) -> None:
            try:
                raise RuntimeError("the routing waits for the host\nmore of it")
            finally:
                raise RuntimeError("capturing stream has unjoined work")

    monkeypatch.setattr("msrnn.hf.cuda_graphs.Graph", GivenUp)
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 9)
    rnn._graphs.possible = True
    with pytest.warns(UserWarning, match=r"launched one by one \(the routing waits for the host\)"):
        assert rnn._graphs.of(rnn.state()) is None


@pytest.mark.gpu
def test_a_model_that_was_moved_is_captured_again() -> None:
    model = build(llama(), "cuda")
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    expected = rnn.step(tokens(1, 1), state)
    model.to("cpu")
    torch.cuda.empty_cache()
    held = model.to("cuda"), torch.full((2**22,), torch.nan, device="cuda")
    again = rnn.state()
    torch.testing.assert_close(rnn.step(tokens(1, 1), again), expected)
    del held


@pytest.mark.gpu
def test_columns_that_a_graph_reads_are_counted() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), "cuda"), "tova", 9, block=16)
    state = rnn.state()
    rnn.read(tokens(1, 100), state)
    for token in tokens(1, 5).split(1, dim=1):
        rnn.step(token, state)
    assert state.columns == 105
    assert state.seen.tolist() == [105]
    state.columns = MOST_COLUMNS
    with pytest.raises(ValueError, match="at most"):
        rnn.step(tokens(1, 1), state)


@pytest.mark.gpu
def test_a_large_batch_is_read_in_short_blocks() -> None:
    model = build(llama(), "cuda")
    ids, mask = left_padded(tokens(448, 80), [0, 30] * 224)
    mine, theirs = msrnn.MultiStateRNN(model, "tova", 9), msrnn.MultiStateRNN(model, "tova", 9, backend="torch")
    for _ in range(3):
        state, expected = mine.state(448), theirs.state(448)
        logits, truth = mine.read(ids, state, mask, last_only=True), theirs.read(ids, expected, mask, last_only=True)
        held, wanted = (each.positions(1).sort(-1).values for each in (state, expected))
        same = (held == wanted).all(-1).all(-1)
        assert same.sum() > 440, "more than near ties among 70,000 evictions can explain"
        torch.testing.assert_close(logits[same], truth[same], atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_a_row_that_ended_reads_nothing_more() -> None:
    """As on a CPU, with steps that are replayed."""
    model = build(llama(), "cuda")
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(2, 20)
    state = rnn.state(2)
    out = rnn.generate(ids, state=state, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert state.seen.tolist() == [32, 32]
    token = int(out[0, 25])
    state = rnn.state(2)
    rnn.generate(ids, state=state, max_new_tokens=12, do_sample=False, eos_token_id=token, pad_token_id=0)
    ends = [row[20:].tolist().index(token) + 21 if token in row[20:].tolist() else 32 for row in out]
    assert state.seen.tolist() == ends


def test_a_function_of_gaps_is_refused_beyond_its_reach() -> None:
    """Before the step, since a replayed graph checks nothing."""
    model = build(llama(), "cuda" if torch.cuda.is_available() else "cpu")
    rnn = msrnn.MultiStateRNN(model, "tova", 9, backend="triton", positions=lambda gap: min(gap, 7))
    state = rnn.state()
    state.columns = 2**20
    with pytest.raises(ValueError, match="positions: your own function is limited to gaps of 1,048,575"):
        rnn.step(tokens(1, 1), state)
    assert state.seen.tolist() == [0]


class EndsAt(StoppingCriteria):
    """Ends row b after `lengths[b]` columns."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths, device="cuda")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["tova", "echo"])
def test_rows_that_ended_keep_their_states_in_a_captured_step(policy: str) -> None:
    model, ids, lengths = build(llama(eos_token_id=None), "cuda"), tokens(3, 14).cuda(), (17, 22, 15)
    rnn, plain = msrnn.MultiStateRNN(model, policy, 9), msrnn.MultiStateRNN(model, policy, 9, backend="torch")
    state = rnn.state(3)
    criteria = StoppingCriteriaList([EndsAt(*lengths)])
    out = rnn.generate(ids, state=state, stopping_criteria=criteria, **greedy(pad_token_id=0))
    assert rnn._graphs.of(state) is not None
    assert state.seen.tolist() == list(lengths)
    token = tokens(1, 1, seed=9).cuda()
    together = rnn.step(token.expand(3, 1), state)  # all rows read again
    for row, length in enumerate(lengths):
        alone = plain.state()
        plain.read(out[row : row + 1, :length], alone)
        torch.testing.assert_close(plain.step(token, alone)[0], together[row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", ["original", "compressed"])
def test_before_a_capture_the_steps_of_a_plan_are_launched(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device: short texts are padded, and only their own columns count."""
    monkeypatch.setattr("msrnn.hf.cuda_graphs.WORTH_CAPTURING", 10**9)
    model = build(llama())
    mine, theirs = (msrnn.MultiStateRNN(model, "h2o", 9, block=32, positions=positions) for _ in range(2))
    mine._graphs.possible = True  # no graph is captured
    mine._graphs.stepwise = positions == "compressed"
    state, expected = mine.state(2), theirs.state(2)
    for length, padding in ((5, 2), (32, 0), (20, 7), (1, 0)):
        ids, mask = left_padded(tokens(2, length, seed=length), [0, padding])
        for last_only in (True, False):
            found, truth = (r.read(ids, s, mask, last_only) for r, s in ((mine, state), (theirs, expected)))
            torch.testing.assert_close(found[:, -1], truth[:, -1], atol=1e-4, rtol=1e-4)
    assert state.columns == expected.columns == 116
    assert torch.equal(state.seen, expected.seen)
    for layer in (0, 1):
        assert torch.equal(state.positions(layer).sort(-1).values, expected.positions(layer).sort(-1).values)
