"""Parts of speech: NLTK's tags of words, and which word each token belongs to."""

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

from msrnn.analysis.passages import Passage
from msrnn.errors import UsageError

TAGGER = "averaged_perceptron_tagger_eng"
NEWLINE, UNTAGGED = "newline", "no word"
EXTRA = "pip install 'msrnn[analyze]'"
HOW = (
    "sentences by NLTK's Punkt, trained on the text itself; words by NLTK's word tokenizer; tags by its averaged "
    "perceptron. A token has the tag of the word that its first character but spaces is in; one of nothing but white "
    "space that has a line break is a newline."
)


class Word(NamedTuple):
    start: int
    stop: int
    tag: str


class Tagger:
    """NLTK's averaged perceptron, its data found where NLTK looks and in `folder`."""

    def __init__(self, folder: Path | None = None) -> None:
        if importlib.util.find_spec("nltk") is None:
            raise UsageError(f"parts of speech need the package nltk, which is not installed: {EXTRA}")
        from nltk.data import path as places
        from nltk.tag.perceptron import PerceptronTagger
        from nltk.tokenize import NLTKWordTokenizer

        if folder is not None and str(folder.resolve()) not in places:
            places.insert(0, str(folder.resolve()))
        try:
            self._perceptron: Any = PerceptronTagger()
        except LookupError as error:
            where = f"--nltk-data {folder}" if folder else "where NLTK looks for its data"
            raise UsageError(
                f"NLTK's tagger is not in {where}: it must have taggers/{TAGGER}/; "
                f"python -m nltk.downloader {TAGGER} fetches it, --nltk-data FOLDER names another place"
            ) from error
        self._words: Any = NLTKWordTokenizer()

    def words(self, passage: Passage) -> list[Word]:
        """Of the part of the text that the passage's tokens are from."""
        from nltk.tokenize import PunktSentenceTokenizer

        text = passage.text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")  # NLTK's clitics know no other
        part, found = text[passage.start : passage.stop], list[Word]()
        for start, stop in PunktSentenceTokenizer(text).span_tokenize(part):
            sentence = part[start:stop]
            tags = (tag for _, tag in self._perceptron.tag(self._words.tokenize(sentence)))
            base = passage.start + start
            spans = self._words.span_tokenize(sentence)
            found += [Word(base + a, base + b, tag) for (a, b), tag in zip(spans, tags, strict=True)]
        return found

    def tags(self, passage: Passage) -> list[str]:
        """Of each token."""
        words = self.words(passage)
        starts = [word.start for word in words]
        return [_tag(passage.text[a:b], a, words, starts) for a, b in passage.spans]


def _tag(piece: str, start: int, words: list[Word], starts: list[int]) -> str:
    if not piece.strip():
        return NEWLINE if "\n" in piece else UNTAGGED
    first = start + len(piece) - len(piece.lstrip())
    i = bisect_right(starts, first) - 1
    return words[i].tag if i >= 0 and first < words[i].stop else UNTAGGED
