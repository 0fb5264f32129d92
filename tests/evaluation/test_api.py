"""Evaluations called from Python: the numbers are those of the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from msrnn import evaluation
from msrnn.cli import main
from msrnn.errors import UsageError
from msrnn.evaluation.report import has_matplotlib
from msrnn.evaluation.tasks.perplexity import Reader
from msrnn.hf.loading import Loaded
from tests.helpers.characters import character_model, character_tokenizer

TEXTS = {name: "".join(f"{name} has {i} words. " for i in range(20)) for name in ("one", "two")}
TOKENIZER = character_tokenizer()
COST = ("seconds", "text", "haystack", "model", "commit", "machine")  # may differ between two runs, or have other names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    character_model().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    (path / "texts").mkdir()
    for name, text in TEXTS.items():
        (path / "texts" / f"{name}.txt").write_text(text)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return loaded


def without_cost(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{name: value for name, value in record.items() if name not in COST} for record in records]


@pytest.fixture
def same_model(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands compute with these very tensors: others may be aligned differently, which changes the last bits."""
    monkeypatch.setattr("msrnn.hf.loading.load", lambda *_, **__: Loaded(model, TOKENIZER))
    monkeypatch.setattr("msrnn.cli.results_folder.draw_if_possible", lambda _: ())  # the figure is not compared


def of_command(folder: Path, out: Path, verb: str, *words: str) -> list[dict[str, object]]:
    """The records that a command writes."""
    common = ["--model", str(folder), "--device", "cpu", "--text", str(folder / "texts"), "--out", str(out)]
    assert main(["eval", verb, *common, *words]) == 0
    return [json.loads(line) for line in (out / f"{verb}.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("same_model")
def test_perplexity_is_that_of_the_command(
    folder: Path, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--policy", "tova", "--policy", "full", "--size", "8", "--size", "16", "--length", "33")
    expected = of_command(folder, tmp_path / "command", "perplexity", *words, "--chunks-per-book", "2")
    arguments = {"tokenizer": TOKENIZER, "length": 33, "chunks_per_book": 2}
    result = evaluation.perplexity(model, TEXTS, ["tova", "full"], [8, 16], folder=tmp_path / "python", **arguments)
    assert without_cost(result.records) == without_cost(expected)
    assert result.table.csv() == (tmp_path / "command" / "perplexity.csv").read_text()
    assert f"{result.report.perplexity('tova', 8).value:.1f}" in str(result)
    assert [line.split()[0] for line in str(result).splitlines()[1:4]] == ["policy", "tova", "full"]
    result.write(tmp_path / "python")
    kinds = ["csv", "jsonl", "md", *(["png", "svg"] if has_matplotlib() else [])]
    assert sorted(path.name for path in (tmp_path / "python").iterdir()) == [f"perplexity.{kind}" for kind in kinds]

    # A folder is a store: nothing is read again, and cells of earlier calls are shown as well.
    with monkeypatch.context() as patched:
        patched.setattr(Reader, "nll", lambda *_: pytest.fail("read again"))
        again = evaluation.perplexity(model, TEXTS, ["tova"], [8], folder=tmp_path / "python", **arguments)
    assert again.others == ["full", "tova 16"]
    assert again.report.perplexity("tova", 16) == result.report.perplexity("tova", 16)


def test_texts_as_token_ids_need_no_tokenizer(model: PreTrainedModel) -> None:
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in TEXTS.values()]
    notes = list[str]()
    progress = evaluation.Progress(note=notes.append)
    result = evaluation.perplexity(model, ids, ["tova"], [8], length=33, chunks_per_book=1, progress=progress)
    assert [record["texts"][0][0] for record in result.records] == ["1", "2"]
    assert result.facts["first token"] == "none"
    assert notes[0] == "cutting 2 of 2 texts into chunks of 33 tokens"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"texts": "one text"}, "texts: one string; give a list of texts"),
        ({"texts": []}, "texts: empty; give a text"),
        ({"tokenizer": None}, "tokenizer: texts are strings; give a tokenizer"),
        ({"against": "h2o"}, "against='h2o': not among the policies tova"),
        ({"policies": ["tovas"]}, "did you mean 'tova'"),
        ({"chunks_per_book": 0}, "chunks_per_book=0: must be a whole number"),
        ({"length": 5000}, "length=5000: the longest text has"),
    ],
)
def test_bad_arguments(changed: dict[str, object], message: str, model: PreTrainedModel) -> None:
    arguments = {"texts": TEXTS, "policies": ["tova"], "sizes": [8], "tokenizer": TOKENIZER, "length": 33, **changed}
    with pytest.raises(UsageError, match=re.escape(message)):
        evaluation.perplexity(model, **arguments)


@pytest.mark.usefixtures("same_model")
def test_retrieval_is_that_of_the_command(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    words = ("--policy", "tova", "--size", "24", "--length", "700", "--task", "number", "--limit", "2", "--no-chat")
    expected = of_command(folder, tmp_path, "retrieval", *words, "--question", "last")
    few = {"tasks": ["number"], "lengths": [700], "limit": 2, "chat": False, "question": "last"}
    text = "\n\n".join(TEXTS.values())
    result = evaluation.retrieval(model, text, ["tova"], [24], tokenizer=TOKENIZER, **few)  # type: ignore[arg-type]
    assert without_cost(result.records) == without_cost(expected)
    assert result.table.csv() == (tmp_path / "retrieval.csv").read_text()


def test_other_evaluations(model: PreTrainedModel, tmp_path: Path) -> None:
    stories = evaluation.stories(model, ["tova"], [16], tokenizer=TOKENIZER, count=2, max_new_tokens=12, chat=False)
    assert [(line.cell.label, line.stories) for line in stories.report] == [("full", 2), ("tova 16", 2)]
    assert len(stories.records) == 4
    reading = {"tokenizer": TOKENIZER, "tokens": 60, "window": 20, "leg": 40}
    far = evaluation.extrapolation(model, TEXTS, ["tova@original"], 8, folder=tmp_path, **reading)
    assert [record["stop"] for record in far.records] == [40, 60] * 2
    assert far.report.ends == [20, 40, 60]
    budget = evaluation.layer_budget(model, TEXTS, "tova", [8, 16], [12], tokenizer=TOKENIZER, length=33)
    assert [sum(sizes) for sizes in budget.report.divided.values()] == [12 * len(budget.report.layers)]
    assert "rows of each layer" in str(budget)


def test_importing_the_functions_does_not_load_torch() -> None:
    code = "import sys; from msrnn import evaluation; assert 'torch' not in sys.modules; print(evaluation.__all__)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "'perplexity'" in ran.stdout
