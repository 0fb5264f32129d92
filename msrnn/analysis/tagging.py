"""Parts of speech: where tokens are in their text, and NLTK's tag of the word that each belongs to."""

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import Chunk, Data, Document

TAGGER = "averaged_perceptron_tagger_eng"
NEWLINE, UNTAGGED = "newline", "no word"
INSTALL = "pip install 'msrnn[analyze]'"
HOW = (
    "sentences by NLTK's Punkt, trained on the text itself; words by NLTK's word tokenizer; tags by its averaged "
    "perceptron. A token has the tag of the word that contains its first character other than a space; a token of "
    "white space with a line break is a newline."
)

Span = tuple[int, int]  # characters; empty for a token without text, such as one that opens a text


@dataclass(frozen=True)
class Passage:
    """Tokens, and the characters of the text that each comes from."""

    text: str
    ids: list[int]
    spans: list[Span]

    @property
    def start(self) -> int:
        return min((start for start, stop in self.spans if start < stop), default=0)

    @property
    def stop(self) -> int:
        return max(stop for _, stop in self.spans)

    @property
    def pieces(self) -> list[str]:
        """The text that each token adds; joined, they are the whole passage.

        If tokens share a character (each has some of its bytes), the first has it and the others are empty.
        """
        pieces, end = [], self.start
        for _, stop in self.spans:
            pieces.append(self.text[end:stop])
            end = max(end, stop)
        return pieces


def passage(text: str, tokenizer: Any, add_special_tokens: bool = False, tokens: int | None = None) -> Passage:
    """A text and its first tokens."""
    if not getattr(tokenizer, "is_fast", False):
        name = type(tokenizer).__name__
        raise UsageError(f"{name} does not record which characters its tokens come from: use a fast tokenizer")
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
    return Passage(text, list(encoded["input_ids"])[:tokens], [(a, b) for a, b in encoded["offset_mapping"]][:tokens])


def passages(data: Data, documents: Sequence[Document], tokenizer: Any) -> list[Passage]:
    """The passage of each chunk, in order; every text is read again."""
    texts = {document.name: document for document in documents}
    whole: dict[str, Passage] = {}
    for name in dict.fromkeys(chunk.book for chunk in data.chunks):
        whole[name] = passage(texts[name].read(), tokenizer)
    return [_chunk_passage(whole[chunk.book], chunk, data.opening) for chunk in data.chunks]


def _chunk_passage(book: Passage, chunk: Chunk, opening: list[int]) -> Passage:
    tokens = slice(chunk.start, chunk.start + len(chunk.ids) - len(opening))
    if opening + book.ids[tokens] != chunk.ids:
        raise UsageError(f"{chunk.book}: the text has changed since it was cut into chunks; start again")
    start = book.spans[tokens][0][0]
    return Passage(book.text, chunk.ids, [*[(start, start)] * len(opening), *book.spans[tokens]])


class Word(NamedTuple):
    start: int
    stop: int
    tag: str


class Tagger:
    """NLTK's averaged perceptron. Its data are looked for in `folder` and in NLTK's own folders."""

    def __init__(self, folder: Path | None = None) -> None:
        if importlib.util.find_spec("nltk") is None:
            raise UsageError(f"parts of speech need the package nltk, which is not installed: {INSTALL}")
        from nltk.data import path as places
        from nltk.tag.perceptron import PerceptronTagger
        from nltk.tokenize import NLTKWordTokenizer

        if folder is not None and str(folder.resolve()) not in places:
            places.insert(0, str(folder.resolve()))
        try:
            self._perceptron: Any = PerceptronTagger()
        except LookupError as error:
            raise UsageError(
                f"taggers/{TAGGER}/ is not in {folder or 'the folders that NLTK searches'}; "
                f"python -m nltk.downloader {TAGGER} downloads it"
            ) from error
        self._words: Any = NLTKWordTokenizer()

    def words(self, passage: Passage) -> list[Word]:
        """The words of the passage, with their tags."""
        from nltk.tokenize import PunktSentenceTokenizer

        text = passage.text.replace(
            "\N{RIGHT SINGLE QUOTATION MARK}", "'"
        )  # NLTK splits clitics at this apostrophe only
        part, words = text[passage.start : passage.stop], list[Word]()
        for start, stop in PunktSentenceTokenizer(text).span_tokenize(part):
            sentence = part[start:stop]
            tags = (tag for _, tag in self._perceptron.tag(self._words.tokenize(sentence)))
            base = passage.start + start
            spans = self._words.span_tokenize(sentence)
            words += [Word(base + a, base + b, tag) for (a, b), tag in zip(spans, tags, strict=True)]
        return words

    def tags(self, passage: Passage) -> list[str]:
        """The tag of each token."""
        words = self.words(passage)
        starts = [word.start for word in words]
        return [_tag(passage.text[a:b], a, words, starts) for a, b in passage.spans]


def _tag(piece: str, start: int, words: list[Word], starts: list[int]) -> str:
    if not piece.strip():
        return NEWLINE if "\n" in piece else UNTAGGED
    first = start + len(piece) - len(piece.lstrip())
    i = bisect_right(starts, first) - 1
    return words[i].tag if i >= 0 and first < words[i].stop else UNTAGGED
