"""`msrnn.evaluation.perplexity`: the numbers are those of the command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.errors import UsageError
from msrnn.evaluation.report import has_matplotlib
from msrnn.evaluation.tasks.perplexity import Reader
from tests.helpers.word_counts import TEXTS, TOKENIZER, without_cost


@pytest.mark.slow
def test_perplexity_is_that_of_the_command(
    of_command: Any, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--policy", "tova", "--policy", "full", "--size", "8", "--size", "16", "--length", "33")
    expected = of_command(tmp_path / "command", "perplexity", *words, "--chunks-per-book", "2")
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
        ({"policies": "tova"}, "policies='tova': must be a list"),
        ({"sizes": 8}, "sizes=8: must be a list"),
        ({"length": 33.0}, "length=33.0: must be a whole number"),
        ({"chunks_per_book": 0}, "chunks_per_book=0: must be a whole number"),
        ({"length": 5000}, "length=5000: the longest text has"),
    ],
)
def test_bad_arguments(changed: dict[str, object], message: str, model: PreTrainedModel) -> None:
    arguments = {"texts": TEXTS, "policies": ["tova"], "sizes": [8], "tokenizer": TOKENIZER, "length": 33, **changed}
    with pytest.raises(UsageError, match=re.escape(message)):
        evaluation.perplexity(model, **arguments)
