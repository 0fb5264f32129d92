"""The tokens that end an answer."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

# Special tokens that end a turn or a text in the model families of today. A checkpoint may know only one of its own.
ENDS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
    }
)


def complete_stop_tokens(model: PreTrainedModel, tokenizer: Any) -> None:
    """Let all ends of its vocabulary stop a model whose checkpoint has no generation settings of its own.

    A GGUF file names one stop token. Without the others, a model that ends its text by another one goes on behind it,
    often with the next turn of a chat that nobody has.
    """
    settings = model.generation_config
    if settings is None or not getattr(settings, "_from_model_config", False):
        return
    added = getattr(tokenizer, "added_tokens_decoder", {})  # not all tokenizers have it
    special = {token.content: number for number, token in added.items() if token.special}
    ends = ENDS & special.keys()
    if "<|call|>" in ends:
        ends -= {"<|end|>"}  # there it ends a message, of which an answer has several
    found = stop_tokens_of(model) | {special[end] for end in ends}
    if found != stop_tokens_of(model):
        settings.eos_token_id = sorted(found)
        settings._from_model_config = False  # these are settings now: transformers would make the others again


def stop_tokens_of(model: PreTrainedModel, tokenizer: Any = None) -> set[int]:
    """The stop tokens of a model and of its tokenizer, if there is one."""
    own = getattr(model.generation_config, "eos_token_id", None)
    tokens = own if isinstance(own, list) else [own]
    return {token for token in (*tokens, getattr(tokenizer, "eos_token_id", None)) if token is not None}
