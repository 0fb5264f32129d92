from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn.errors import UsageError
from msrnn.evaluation.api.common import check_positions, cut_chunks, documents_of, model_name, open_store
from msrnn.evaluation.data.texts import Choice, Document
from msrnn.evaluation.store import Store
from tests.helpers.word_counts import TEXTS, TOKENIZER


def test_a_store_in_memory_in_a_folder_or_given(tmp_path: Path) -> None:
    def check(record: Any) -> str | None:
        return None if "a" in record else "without a"

    assert open_store(None, "x", check).records == []
    made = open_store(tmp_path / "new" / "folder", "x", check)
    made.append({"a": 1})
    assert (tmp_path / "new" / "folder" / "x.jsonl").exists()
    assert open_store(made, "y", check) is made
    assert open_store(str(tmp_path / "new" / "folder"), "x", check).records == [{"a": 1}]
    (tmp_path / "bad.jsonl").write_text('{"b": 1}\n')
    with pytest.raises(ValueError, match="without a"):
        open_store(tmp_path, "bad", check)


def test_a_store_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="a file; give a folder") as refused:
        open_store(tmp_path / "file", "x", lambda _: None)
    assert refused.value.name == "folder"
    assert isinstance(open_store(tmp_path, "x", lambda _: None), Store)


def test_texts_have_names_or_numbers() -> None:
    given = Document("mine", lambda: "c")
    found = documents_of(["a", [5, 6], given])
    assert [document.name for document in found] == ["1", "2", "mine"]
    assert [document.name for document in documents_of({"x": "a", "y": "b"})] == ["x", "y"]
    assert found[0].ids is None
    assert found[1].ids is not None
    assert found[1].ids() == [5, 6]
    assert found[2] is given


@pytest.mark.parametrize("texts", ["a text", [], {}])
def test_texts_that_are_refused(texts: Any) -> None:
    with pytest.raises(UsageError) as refused:
        documents_of(texts)
    assert refused.value.name == "texts"


def test_chunks_of_texts(model: PreTrainedModel) -> None:
    said: list[str] = []
    data = cut_chunks(model, TEXTS, TOKENIZER, Choice(33, 1, 2, 0), said.append)
    assert len(data.chunks) == 2
    assert said[0] == "cutting 1 of 2 texts into chunks of 33 tokens"
    with pytest.raises(UsageError) as refused:
        cut_chunks(model, TEXTS, None, Choice(33, 1, 2, 0), said.append)
    assert refused.value.name == "tokenizer"


def test_more_tokens_than_positions() -> None:
    said: list[str] = []
    learned, rotated = (
        SimpleNamespace(max_position_embeddings=100),
        SimpleNamespace(max_position_embeddings=100, rope_parameters={"rope_type": "default"}),
    )
    check_positions(learned, 100, said.append)
    check_positions(SimpleNamespace(), 10**9, said.append)
    assert said == []
    with pytest.raises(UsageError, match="tokens=101: this model has 100 positions; use fewer tokens"):
        check_positions(learned, 101, said.append, "tokens")
    check_positions(rotated, 101, said.append)
    assert said == ["101 tokens are more than the 100 that this model was trained for"]


def test_the_name_of_a_model(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "name_or_path", "mine")
    assert model_name(model) == "mine"
    monkeypatch.setattr(model, "name_or_path", "")
    assert model_name(model) == "LlamaForCausalLM"
