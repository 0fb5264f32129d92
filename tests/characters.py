"""A tokenizer of characters, with a chat template."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

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
