from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import msrnn
from msrnn.errors import UsageError
from msrnn.server.errors import ApiError
from msrnn.server.infill import FORMS, InfillForm, encode_infill, find_ends, find_form
from msrnn.server.limits import Limits
from msrnn.server.protocol import parse_completion
from msrnn.server.server import Server
from tests.helpers.characters import BOS, character_model, character_tokenizer
from tests.helpers.live_server import served_by
from tests.helpers.tiny import build, llama

QWEN, CODE_LLAMA = FORMS[0], FORMS[-1]


def tokenizer_of(form: InfillForm, *more: str) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([*form, *more], special_tokens=True)
    return tokenizer


def sentencepiece() -> Any:
    """Begins every text with a space, as that of CodeLlama; one token per character."""
    names = ["<unk>", "<s>", *CODE_LLAMA, "▁<EOT>", "▁", "☺", *"abcdef"]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="module")
def engine() -> msrnn.Engine:
    tokenizer = tokenizer_of(QWEN, "<|fim_pad|>")
    rnn = msrnn.MultiStateRNN(build(llama(vocab_size=len(tokenizer), eos_token_id=None), "cpu"), "tova", 16)
    return msrnn.Engine(rnn, 4, tokenizer=tokenizer)


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_models(form: InfillForm) -> None:
    tokenizer = tokenizer_of(form)
    assert find_form(tokenizer) == form
    names = tokenizer.convert_ids_to_tokens(encode_infill(tokenizer, "ab", "c"))
    assert names == ["<s>", form.prompt, "a", "b", form.suffix, "c", form.middle]
    assert tokenizer.convert_ids_to_tokens(encode_infill(tokenizer, "", "c"))[1:3] == [form.prompt, form.suffix]


def test_no_space_comes_before_a_suffix() -> None:
    tokenizer = sentencepiece()
    names = tokenizer.convert_ids_to_tokens(encode_infill(tokenizer, "ab", "cd"))
    assert names == ["<s>", "▁<PRE>", "▁", "a", "b", "▁<SUF>", "c", "d", "▁<MID>"]
    assert find_ends(tokenizer) == [2, 3, 4, 5]


def test_the_tokens_that_end_an_infill() -> None:
    tokenizer = tokenizer_of(QWEN, "<|fim_pad|>", "<|file_sep|>", "<|other|>")
    assert tokenizer.convert_ids_to_tokens(find_ends(tokenizer)) == [*QWEN, "<|fim_pad|>", "<|file_sep|>"]


@pytest.mark.parametrize("names", [(), QWEN[:2], ("<fim_prefix>", "<|fim_suffix|>", "<fim_middle>")])
def test_a_tokenizer_without_infill_tokens(names: tuple[str, ...]) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([*names], special_tokens=True)
    with pytest.raises(UsageError, match="suffix: this model's tokenizer has no infill tokens"):
        find_form(tokenizer)


@pytest.mark.parametrize(("prompt", "suffix", "name"), [("a<|fim_middle|>", "b", "prompt"), ("a", QWEN[0], "suffix")])
def test_texts_cannot_have_infill_tokens(prompt: str, suffix: str, name: str) -> None:
    with pytest.raises(UsageError, match="has the infill token") as error:
        encode_infill(tokenizer_of(QWEN), prompt, suffix)
    assert error.value.name == name
    encode_infill(tokenizer_of(FORMS[1]), prompt, suffix)  # where they are text


def test_a_completion_with_a_suffix(engine: msrnn.Engine) -> None:
    served = served_by(engine)
    job = parse_completion({"prompt": ["ab", "a"], "suffix": "c", "stop_token_ids": [7]}, served)
    assert job.prompts == [encode_infill(served.tokenizer, text, "c") for text in ("ab", "a")]
    assert [*job.params.stop_token_ids] == [7, *find_ends(served.tokenizer)]
    assert [*parse_completion({"prompt": "a", "suffix": "c", "ignore_eos": True}, served).params.stop_token_ids] == []
    plain = parse_completion({"prompt": "ab", "suffix": ""}, served)
    assert (plain.prompts[0][0], [*plain.params.stop_token_ids]) == (BOS, [])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [5, 6]}, "suffix"),
        ({"prompt": ["a", [5]]}, "suffix"),
        ({"session_id": "ann"}, "suffix"),
        ({"echo": True}, "suffix"),
        ({"suffix": "<|fim_prefix|>"}, "suffix"),
        ({"prompt": "<|fim_prefix|>"}, "prompt"),
        ({"suffix": "\ud800"}, "suffix"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "a" * 50_000}, "max_tokens"),
    ],
)
def test_what_is_refused(engine: msrnn.Engine, body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_completion({"prompt": "a", "suffix": "c", **body}, served_by(engine))
    assert (error.value.status, error.value.param) == (400, param)


def test_a_model_without_infill_tokens_says_so() -> None:
    engine = msrnn.Engine(msrnn.MultiStateRNN(character_model(), "tova", 16), 2, tokenizer=character_tokenizer())
    with pytest.raises(ApiError, match="no infill tokens") as error:
        parse_completion({"prompt": "a", "suffix": "c"}, served_by(engine))
    assert (error.value.status, error.value.param) == (400, "suffix")


def test_the_answer_is_what_comes_between(engine: msrnn.Engine) -> None:
    """As after the same tokens; a token that ends an infill ends it."""
    tokens = encode_infill(engine.tokenizer, "ab", "cd")
    (end,) = engine.tokenizer.convert_tokens_to_ids(["<|fim_pad|>"])

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(Server(engine, served_by(engine), Limits()).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            never = {str(token): -100 for token in find_ends(engine.tokenizer)}
            fields: Any = {"max_tokens": 6, "temperature": 0, "logit_bias": never}
            ends = {"logit_bias": {**never, str(end): 100}}
            bodies: list[Any] = [{"prompt": "ab", "suffix": "cd"}, {"prompt": tokens}]
            bodies += [{**body, **ends} for body in bodies]
            found = [await client.post("/v1/completions", json={**fields, **body}) for body in bodies]
            return [one.json()["choices"][0] for one in found]

    infill, plain, ended, going_on = asyncio.run(ask())
    assert infill == plain
    assert (ended["text"], ended["finish_reason"], going_on["finish_reason"]) == ("", "stop", "length")
