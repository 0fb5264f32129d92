from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from msrnn.analysis.tagging import NEWLINE, UNTAGGED, Passage, Tagger, passage, passages
from msrnn.evaluation.data.texts import Choice, Document, choose
from msrnn.hf.loading import Loaded
from tests.helpers.tagger import trained

nltk = pytest.importorskip("nltk", reason="parts of speech need nltk: pip install 'msrnn[analyze]'")


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Tagger:
    before = list(nltk.data.path)
    made = Tagger(trained(tmp_path_factory.mktemp("nltk")))
    nltk.data.path[:] = before
    return made


def cut(text: str, *pieces: str) -> Passage:
    """A passage whose tokens are these pieces, end to end."""
    assert "".join(pieces) == text
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    return Passage(text, list(range(len(pieces))), list(zip([0, *ends[:-1]], ends, strict=True)))


def test_a_token_has_the_tag_of_its_word(tagger: Tagger) -> None:
    pieces = ("Tom", "'s", " d", "og", " barks", ".", "\n\n", "The", " dog", " ", " barks", " loud", ".")
    found = tagger.tags(cut("".join(pieces), *pieces))
    assert found[:7] == ["NNP", "POS", "NN", "NN", "VBZ", ".", NEWLINE]
    assert found[7:] == ["DT", "NN", UNTAGGED, "VBZ", "RB", "."]


def test_quotation_marks_are_told_apart(tagger: Tagger) -> None:
    found = tagger.tags(cut('"Go!" the dog barks.', '"', "Go", '!"', " the", " dog", " barks", "."))
    assert found == ["``", "VB", ".", "DT", "NN", "VBZ", "."]
    pieces = ("Tom", "\N{RIGHT SINGLE QUOTATION MARK}s", " dog", " barks", ".")
    assert tagger.tags(cut("".join(pieces), *pieces)) == ["NNP", "POS", "NN", "VBZ", "."]


def test_only_the_passage_is_tagged_and_openings_have_no_tag(tagger: Tagger) -> None:
    whole = cut("The dog barks. Tom's dog barks.", "The dog barks.", " Tom", "'s", " dog barks.")
    part = Passage(whole.text, whole.ids[1:], [(14, 14), *whole.spans[1:]])
    assert tagger.tags(part) == [UNTAGGED, "NNP", "POS", "NN"]
    assert [word.tag for word in tagger.words(part)] == ["NNP", "POS", "NN", "VBZ", "."]


def test_without_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(ValueError, match=r"^taggers/averaged_perceptron_tagger_eng/ is not in .*; python -m nltk"):
        Tagger(tmp_path)
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(ValueError, match="is not in the folders that NLTK searches"):
        Tagger()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"msrnn\[analyze\]"):
        Tagger()


@pytest.mark.small_model
def test_pieces_are_the_whole_text(small: Loaded) -> None:
    text = "A  caf\u00e9 \N{ROBOT FACE}, \u05e9\u05dc\u05d5\u05dd.\n\n\tIt's 12,345 <b>!</b>\x00"
    found = passage(text, small.tokenizer)
    assert "".join(found.pieces) == text
    assert "" in found.pieces  # a character of several tokens is shown once
    assert passage(text, small.tokenizer, tokens=3).pieces == found.pieces[:3]


@pytest.mark.small_model
def test_passages_are_those_of_the_chunks(small: Loaded) -> None:
    texts = {name: f"This is the {name} of several texts, and it has a few words. " * 9 for name in ("one", "two")}
    shelf = [Document(name, partial(str, text)) for name, text in texts.items()]
    data = choose(shelf, small.tokenizer, Choice(length=20))
    found = passages(data, shelf, small.tokenizer)
    assert len(found) == 8
    for chunk, part in zip(data.chunks, found, strict=True):
        assert "".join(part.pieces) == small.tokenizer.decode(chunk.ids)
        assert part.text == texts[chunk.book]
    changed = [Document(document.name, lambda: "Other words. " * 99) for document in shelf]
    with pytest.raises(ValueError, match="has changed"):
        passages(data, changed, small.tokenizer)


def test_a_tokenizer_that_does_not_know_where() -> None:
    with pytest.raises(ValueError, match="use a fast tokenizer"):
        passage("text", object())
