"""The bytes of tokens, also of those that are a part of a character; and how long a token's text can be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from msrnn.hf.loading import Loaded
from msrnn.server.token_texts import TokenTexts, _bound, fewest_tokens
from tests.helpers.characters import character_tokenizer
from tests.helpers.live_server import post


def falling_back(**options: Any) -> Tokenizer:
    """As tokenizers of sentencepiece: characters that it does not have are written as bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [("▁", "a"), ("a", "b")]
    found = Tokenizer(
        models.BPE(vocabulary, merges, **{"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, **options})
    )
    found.normalizer = normalizers.Replace(" ", "▁")
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return found


TEXTS = st.text() | st.lists(st.sampled_from("🌊é世 ab\n\u0301")).map("".join)


@given(TEXTS)
def test_bytes_of_a_text(small: Loaded, text: str) -> None:
    for tokenizer in (small.tokenizer, PreTrainedTokenizerFast(tokenizer_object=falling_back(), unk_token="<unk>")):
        texts = TokenTexts.of(tokenizer)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        bound = _bound(tokenizer, len(tokenizer))
        assert bound is not None
        assert b"".join(map(texts.raw, ids)) == text.encode().translate(None, bound.dropped)
        assert fewest_tokens(tokenizer, text) <= len(ids)


def test_the_whole_vocabulary(small: Loaded) -> None:
    """A token's bytes decode to its text, whatever is not a character replaced."""
    tokenizer: Any = small.tokenizer
    texts = TokenTexts.of(tokenizer)
    for token in range(len(tokenizer)):
        assert texts.raw(token).decode(errors="replace") == tokenizer.decode([token])
    assert texts.raw(tokenizer.eos_token_id) == tokenizer.eos_token.encode()
    parts = [token for token in range(len(tokenizer)) if texts.raw(token) != texts.text(token).encode()]
    assert len(parts) > 100


def test_tokenizers_whose_tokens_have_any_length() -> None:
    def longest(**changes: Any) -> int | None:
        backend = falling_back(**{name: changes.pop(name) for name in [*changes] if name in ("byte_fallback",)})
        for name, value in changes.items():
            setattr(backend, name, value)
        return longest_of(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))

    def longest_of(tokenizer: Any) -> int | None:
        bound = _bound(tokenizer, len(tokenizer))
        return None if bound is None else bound.longest

    assert longest() == 6  # that of the names of bytes
    assert longest(normalizer=normalizers.NFC()) == 24
    assert longest(byte_fallback=False) is None  # unknown characters are one token together
    assert longest(normalizer=normalizers.Strip()) is None
    assert longest(normalizer=normalizers.Replace("  ", " ")) is None
    assert longest(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])) is None
    assert longest(pre_tokenizer=pre_tokenizers.Whitespace()) is None
    assert longest(pre_tokenizer=pre_tokenizers.Split(" ", "removed")) is None
    assert longest(pre_tokenizer=pre_tokenizers.Split(" ", "isolated")) == 6
    assert fewest_tokens(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel())), "a" * 99) == 0
    greedy = PreTrainedTokenizerFast(tokenizer_object=falling_back(), unk_token="<unk>")
    greedy.add_special_tokens({"eos_token": AddedToken("<end>", rstrip=True)})
    assert longest_of(greedy) is None
    assert longest_of(character_tokenizer()) == len("<system>")


def test_bytes_in_replies(address: str, small: Loaded) -> None:
    """A character of several tokens is their bytes together."""
    ids = small.tokenizer("🌊", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    found = []
    for token in ids:
        body = {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": 1,
            "logit_bias": {str(token): 100},
        }
        (choice,) = post(address, body, "/v1/chat/completions").json()["choices"]
        found += choice["logprobs"]["content"][0]["bytes"]
    assert bytes(found).decode() == "🌊"


@pytest.mark.parametrize("extra", [0, 1])
def test_texts_that_cannot_fit_are_not_tokenized(
    address: str, small: Loaded, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest text that may fit is tokenized; one character more is refused at once."""
    bound = _bound(small.tokenizer, len(small.tokenizer))
    assert bound is not None
    called: list[int] = []

    def counted(tokenizer: Any, text: str, begins: bool) -> Any:
        called.append(len(text))
        raise AssertionError

    monkeypatch.setattr("msrnn.server.prompts.encode", counted)
    text = "a" * (bound.longest * 2000 + extra)
    found = post(address, {"prompt": text})
    assert called == ([] if extra else [len(text)])
    if extra:
        assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded")
