"""A tokenizer of characters with a chat template, and a tiny random model for it."""

from __future__ import annotations

import string

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "<end>", "<user>", "<model>", "<system>"]
BOS, END = 1, 2
TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<system>be kind<end>\n{% endif %}"
    "{% if m['role'] == 'assistant' %}<model>{% else %}<{{ m['role'] }}>{% endif %}{{ m['content'] }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)
THINKING = (  # with two variables: one that the answer begins with, and one that the conversation begins with
    TEMPLATE.replace(
        "{% if add_generation_prompt %}<model>", "{% if add_generation_prompt %}<model>{{ mood }}"
    ).replace("<s>{%", "<s>{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}{%", 1)
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


def character_model() -> LlamaForCausalLM:
    """A random model of two layers with the vocabulary of `character_tokenizer`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(character_tokenizer()),
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
    return LlamaForCausalLM(config)
