"""A tiny random model with a tokenizer of characters, in a folder, and the command line run inside the test."""

from __future__ import annotations

import io
import string
from pathlib import Path

import pytest
import torch
from command import Ran, Run
from tokenizers import Tokenizer, decoders, models, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from msrnn.cli import main

SPECIAL = ["<unk>", "<s>", "<end>", "<user>", "<model>", "<system>"]
BOS, END = 1, 2
TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<system>be kind<end>\n{% endif %}"
    "{% if m['role'] == 'assistant' %}<model>{% else %}<{{ m['role'] }}>{% endif %}{{ m['content'] }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, so that text and tokens are each other's image, and one that opens a text."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(string.printable)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<end>",
        pad_token="<end>",
        additional_special_tokens=SPECIAL[3:],
        model_max_length=64,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as `--model` takes it."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=END,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("generate", "hello")`: a verb on the tiny model; `small=True` leaves the model to the verb."""

    def run(*arguments: object, stdin: str = "", small: bool = False) -> Ran:
        words = [str(a) for a in arguments]
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = main(words if small else [*words, "--model", str(folder)])
        return Ran(code, *capsys.readouterr())

    return run
