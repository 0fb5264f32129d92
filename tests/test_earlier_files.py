"""Files that were written when a budget was a field of the policy: states load, and stored results are found.

`tests/earlier/` was written by the code of commit 572b0f7 with the model `portable()` and the ids below: a state
under policy "echo+1~40:upper" at size 8, rows of `Perplexity`, and the budget that one of them names.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.analysis.trace import TraceStore, find_traced_cells
from msrnn.cli.model_options import GivenOptions
from msrnn.evaluation.cells import cell_of, grid
from msrnn.evaluation.data.texts import Chunk, Data
from msrnn.evaluation.runner import Progress, Runner
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.perplexity import CHECK, Reader, perplexity_task
from msrnn.policy import Policy
from msrnn.size import Size, SizeLike
from tests.helpers.tiny import portable

FOLDER = Path(__file__).parent / "earlier"
STATE = FOLDER / "echo-upper-8.safetensors"
IDS = torch.arange(40)[None] * 7 % 89 + 3
READ = 30  # tokens that the state has read, and that the stored losses are of


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return portable()


@pytest.mark.parametrize(
    ("policy", "size"), [("echo+1~40:upper", 8), ("echo+1~40", "8:upper"), (Policy.parse("echo+1~40"), [6, 10])]
)
def test_a_state_loads_and_goes_on(model: PreTrainedModel, policy: str | Policy, size: SizeLike) -> None:
    rnn = msrnn.MultiStateRNN(model, policy, size)
    state, fresh = rnn.load_state(STATE), rnn.state()
    rest, whole = rnn.read(IDS[:, READ:], state), rnn.read(IDS, fresh)
    torch.testing.assert_close(rest, whole[:, READ:], rtol=1e-3, atol=1e-4)
    for layer in range(2):
        assert set(state.positions(layer).flatten().tolist()) == set(fresh.positions(layer).flatten().tolist())


def test_the_options_of_a_state() -> None:
    options = GivenOptions().complete(STATE)
    assert (options.policy, options.size) == (Policy.parse("echo+1~40"), Size((6, 10)))
    assert GivenOptions(policy="echo", size="[6, 10]").complete(STATE) == options
    with pytest.raises(msrnn.UsageError, match=r"--size 8: .* was saved with --size \[6, 10\]"):
        GivenOptions(size="8").complete(STATE)
    with pytest.raises(msrnn.UsageError, match=r"--policy echo:upper: .* was saved with --policy echo"):
        GivenOptions(policy="echo:upper").complete(STATE)


def test_stored_results_are_not_computed_again(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("perplexity.jsonl", "budget.json"):
        shutil.copy(FOLDER / name, tmp_path)
    monkeypatch.chdir(tmp_path)  # one policy names its budget as budget.json
    before = Path("perplexity.jsonl").read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    asked = grid([row["policy"] for row in rows], [8], READ)
    assert set(asked.cells) == set(map(cell_of, rows))
    assert list(asked.policies) == [row["policy"] for row in rows], "tables print the names that users know"
    data = Data([Chunk("book", 0, IDS[0, :READ].tolist())], [], READ, 1, 0, 1, 0)
    run = Runner(perplexity_task(model, data, {}), Store(Path("perplexity.jsonl"), CHECK), model, 1)
    assert set(run.other_results([])) == set(asked.cells)
    monkeypatch.setattr(Reader, "nll", lambda *_: pytest.fail("computed again"))
    run.run(asked.cells, Progress())
    assert Path("perplexity.jsonl").read_text() == before


def test_stored_losses_are_those_of_the_same_model(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    rows = [json.loads(line) for line in Path("perplexity.jsonl").read_text().splitlines()]
    for row in rows:
        if row["numbers"]:
            reader = Reader(msrnn.MultiStateRNN(model, **cell_of(row).options), 0)
            assert reader.nll(IDS[:, :READ]) == pytest.approx(row["nll"], rel=1e-4)


def test_traces_have_the_same_files(model: PreTrainedModel, tmp_path: Path) -> None:
    names = {"tova": "tova-8-4060f2c7da783ebf.npz", "echo:upper": "echo:upper-8-d960066e6e77e3a7.npz"}
    for policy, name in names.items():
        assert TraceStore(tmp_path, model, policy, 8).path([1, 2, 3]).name == name
        (tmp_path / name).touch()
    assert sorted(find_traced_cells(tmp_path)) == [("echo:upper", 8), ("tova", 8)]
