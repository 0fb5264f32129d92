"""A tokenizer of bytes, which can follow grammars, and a tiny random model for it."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.helpers.characters import TEMPLATE
from tests.helpers.tiny import build, llama

END = 256
SPECIAL = ["<end>", "<s>", "<user>", "<model>", "<system>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, of the ids 0 to 255, and special ones after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *SPECIAL])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<end>",
        bos_token="<s>",
        additional_special_tokens=SPECIAL[2:],
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def byte_model() -> LlamaForCausalLM:
    """A random model with the vocabulary of `byte_tokenizer`, and some ids more."""
    return build(llama(vocab_size=272, bos_token_id=257, eos_token_id=END), "cpu")
