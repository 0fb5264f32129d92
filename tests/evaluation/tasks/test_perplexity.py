from __future__ import annotations

import csv
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from msrnn.core.change import AHEAD
from msrnn.evaluation.cells import BASELINE, Cell, Grid
from msrnn.evaluation.data.texts import Choice, Document, choose
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.perplexity import (
    PAPER_ROWS,
    PAPER_SIZES,
    Reader,
    Report,
    cell_reader,
    figure,
    format_perplexity,
    format_ratio,
    grid,
    pieces,
)
from msrnn.hf.cache import MultiStateCache
from msrnn.hf.loading import Loaded
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.future_by_hand import read_by_hand
from tests.helpers.letters import Letters
from tests.helpers.perplexity_chunks import FULL, LENGTH, data, runner
from tests.helpers.tiny import build, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


@torch.no_grad()
def stepped(model: PreTrainedModel, ids: Tensor, policy: str, size: int, given: int = 1) -> float:
    """The loss of [T] ids, token by token, with transformers' own calls."""
    cache, nll = MultiStateCache(model, policy, size), 0.0
    for t in range(len(ids) - 1):
        logits = model(input_ids=ids[None, t : t + 1], past_key_values=cache, use_cache=True).logits[0, -1]
        nll += cross_entropy(logits.float(), ids[t + 1]).item() if t + 1 >= given else 0.0
    return nll


@torch.no_grad()
def unmodified(model: PreTrainedModel, ids: Tensor, given: int = 1) -> float:
    model.set_attn_implementation("eager")
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return cross_entropy(logits[given - 1 : -1].float(), ids[given:], reduction="sum").item()


@pytest.mark.parametrize("policy", ["tova", "window+4", "h2o", "tova-head"])
@pytest.mark.parametrize("opening", [0, 1, 2])
def test_as_if_stepped_token_by_token(model: PreTrainedModel, policy: str, opening: int) -> None:
    ids = torch.tensor([chunk.ids for chunk in data(2, opening).chunks])
    found = cell_reader(model, Cell(policy, 12), opening).nll(ids)
    assert found == pytest.approx([stepped(model, row, policy, 12, max(1, opening)) for row in ids], rel=1e-5)
    assert found != pytest.approx(cell_reader(model, FULL, opening).nll(ids), rel=1e-5)


def test_every_token_recalls(model: PreTrainedModel) -> None:
    """As if stepped token by token; with enough recalled rows it is the full model."""
    ids = torch.tensor([chunk.ids for chunk in data(2).chunks])
    nll = {name: cell_reader(model, Cell(name, 12), 1).nll(ids) for name in ("tova", "tova + 6 recalled")}
    rnn = MultiStateRNN(model, "tova", 12, recall=6)
    state = rnn.state(2)
    logits = torch.cat([rnn.step(ids[:, t : t + 1], state) for t in range(LENGTH - 1)], 1)
    stepped = cross_entropy(logits.transpose(1, 2).float(), ids[:, 1:], reduction="none").sum(-1)
    assert nll["tova + 6 recalled"] == pytest.approx(stepped.tolist(), rel=1e-5)
    assert nll["tova + 6 recalled"] != pytest.approx(nll["tova"], rel=1e-5)
    full = cell_reader(model, FULL, 1).nll(ids)
    assert cell_reader(model, Cell(f"tova + {LENGTH} recalled", 12), 1).nll(ids) == pytest.approx(full, rel=1e-5)


@pytest.mark.slow
@pytest.mark.small_model
def test_as_if_stepped_on_words(small: Loaded) -> None:
    text = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, "
    made = choose([Document("moby", lambda: text * 2)], small.tokenizer, Choice(length=24, chunks_per_book=1))
    ids = torch.tensor([made.chunks[0].ids])
    for policy in ("tova", "window+4"):
        found = cell_reader(small.model, Cell(policy, 16), len(made.opening)).nll(ids)
        assert found == pytest.approx([stepped(small.model, ids[0], policy, 16, made.given)], rel=1e-4)
    assert cell_reader(small.model, FULL, 0).nll(ids) == pytest.approx([unmodified(small.model, ids[0])], rel=1e-4)


def test_as_many_states_as_tokens_is_the_unmodified_model(model: PreTrainedModel) -> None:
    made = data()
    expected = [unmodified(model, torch.tensor(chunk.ids)) for chunk in made.chunks]
    assert cell_reader(model, FULL, 1).nll(torch.tensor([c.ids for c in made.chunks])) == pytest.approx(
        expected, rel=1e-5
    )
    for name in ("tova", "h2o", BASELINE):
        assert cell_reader(model, Cell(name, LENGTH), 1).nll(torch.tensor([made.chunks[0].ids])) == pytest.approx(
            expected[:1], rel=1e-5
        )
    table = grid(["tova", BASELINE, "full"], [LENGTH, 8, LENGTH + 1], LENGTH)
    assert table.cells == [FULL, Cell("tova", 8), Cell(BASELINE, 8)]


@pytest.mark.parametrize("opening", [0, 1, 2])
@pytest.mark.parametrize("size", [3, 7, 10, 39, 40])
def test_every_row_predicts_the_same_tokens(size: int, opening: int) -> None:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    given = max(1, opening)
    cut = pieces(ids, size, opening)
    assert torch.equal(torch.cat([piece[:, given:] for piece in cut], dim=1), ids[:, given:])
    assert all(piece.shape[1] == size for piece in cut[:-1])
    assert cut[-1].shape[1] <= size
    for before, piece in pairwise(cut):
        assert torch.equal(piece[:, :given], ids[:, :opening] if opening else before[:, -1:])


@pytest.mark.parametrize("opening", [0, 1, 2])
def test_the_baseline_is_the_unmodified_model_on_pieces(model: PreTrainedModel, opening: int) -> None:
    ids = torch.tensor([chunk.ids for chunk in data(2, opening).chunks])
    read, reader = list[int](), cell_reader(model, Cell(BASELINE, 9), opening)
    assert isinstance(reader, Reader)
    reader.rnn.block = 18  # so that two pieces are read together
    found = reader.nll(ids, read.append)
    cut = pieces(ids, 9, opening)
    expected = [sum(unmodified(model, piece[row], max(1, opening)) for piece in cut) for row in (0, 1)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert sum(read) == sum(piece[:, 1:].numel() for piece in cut)
    assert max(read) == 2 * 2 * 8


@pytest.mark.parametrize("opening", [0, 1, 2])
def test_the_true_future(model: PreTrainedModel, opening: int) -> None:
    ids = torch.tensor([chunk.ids for chunk in data(2, opening).chunks])
    given, read = max(1, opening), list[int]()
    found = cell_reader(model, Cell("future", 9), opening).nll(ids, read.append)
    logits = [read_by_hand(model, row[:-1], [9, 9], AHEAD)[0] for row in ids]
    expected = [
        cross_entropy(one[given - 1 :], row[given:], reduction="sum").item()
        for one, row in zip(logits, ids, strict=True)
    ]
    assert found == pytest.approx(expected, rel=1e-5)
    assert sum(read) == ids[:, 1:].numel()
    assert cell_reader(model, Cell("future", LENGTH), opening).nll(ids) == pytest.approx(
        [unmodified(model, row, given) for row in ids], rel=1e-5
    )
    with pytest.raises(ValueError, match="size=0"):
        grid(["future"], [0], LENGTH)


def test_pieces_that_predict_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="size=2"):
        pieces(tokens(1, 9), 2, 2)
    with pytest.raises(ValueError, match="size=1"):
        grid([BASELINE], [1], LENGTH)


def test_the_table_of_the_paper() -> None:
    table = grid([*PAPER_ROWS, "full"], PAPER_SIZES, 4096)
    assert (len(table.policies), len(table.sizes)) == (11, 7)
    assert len(table.cells) == 10 * 6 + 1
    assert table.at("tova", 4096) == table.at("full", 64) == FULL
    assert grid(["tova+0", "tova"], [8, 8, 4], 16) == Grid(["tova"], [4, 8], 16)


@pytest.fixture
def report() -> Report:
    """Of two chunks of ten tokens, on which every token costs a policy the same."""
    table = grid(["tova", "window", "full"], [8, 16], 16)
    costs = {FULL: 2.0, Cell("tova", 8): 4.0, Cell("window", 8): 4000.0}
    return Report(table, {cell: [10 * math.log(x)] * 2 for cell, x in costs.items()}, 10, "tova")


def test_tables(report: Report) -> None:
    first, second = report.tables("a model")
    assert first.strings(" ") == [
        ["tova", "4.00 4.00–4.00", "2.00 2.00–2.00"],  # noqa: RUF001
        ["window", "4,000 4,000–4,000", "2.00 2.00–2.00"],  # noqa: RUF001
        ["full", "2.00 2.00–2.00", "2.00 2.00–2.00"],  # noqa: RUF001
    ]
    assert [row[0] for row in second.rows] == ["window", "full"]
    assert second.strings(" ")[1] == ["full", "-50.0% -50.0% to -50.0%", "—"]
    assert format_perplexity(Estimate(7.155)).text("\n") == "7.16"
    assert format_ratio(Estimate(0.0)).text("\n") == "+0.0%"


def test_files(report: Report, tmp_path: Path) -> None:
    text = report.markdown("a model", {"torch": "2", "commit": ""})
    assert "| tova | 4.00 · 4.00–4.00 | 2.00 · 2.00–2.00 |" in text  # noqa: RUF001
    assert "| full | -0.6931, -50.0% · -50.0% to -50.0% | — |" in text
    assert text.endswith("\n\n- torch: 2\n")
    rows = list(csv.DictReader(report.tables("")[0].csv().splitlines()))
    assert [(row["policy"], row["size"]) for row in rows[:3]] == [("tova", "8"), ("tova", "16"), ("window", "8")]
    assert float(rows[2]["perplexity"]) == pytest.approx(4000)
    assert float(rows[2]["ratio"]) == pytest.approx(1000)
    assert (rows[0]["tokens"], rows[0]["chunks"], rows[0]["ratio"]) == ("20", "2", "")
    figure(report, tmp_path, "a model")
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "perplexity.svg").read_text()


def test_letters_as_tokens(model: PreTrainedModel) -> None:
    """From a text to its perplexity, by hand."""
    text = "".join(chr(3 + i * i % 90) for i in range(35))
    made = choose([Document("one", lambda: text)], Letters(1), Choice(length=11, chunks_per_book=2))
    sums = runner(model, made, Store(None), 2, {}).results([FULL])[FULL]
    report = Report(grid(["full"], [4], 11), {FULL: sums}, made.predicted, "full")
    expected = sum(unmodified(model, torch.tensor([1, *map(ord, text[c.start : c.start + 10])])) for c in made.chunks)
    assert report.perplexity("full", 4).value == pytest.approx(math.exp(expected / 20), rel=1e-5)
