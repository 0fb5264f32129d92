"""Tiny random models, one per family, and the oracle: a whole model run by the definition, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers as tf
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from msrnn.bound import layer_bound
from msrnn.core.rope import Repositioning
from msrnn.core.weight_network import WeightNetwork
from msrnn.hf.inspect import sliding_windows
from msrnn.policy import Policy
from msrnn.reference import recurrent
from msrnn.size import SizeLike, layer_sizes, resolve

VOCABULARY = 97
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE: dict[str, Any] = {**_BASE, "head_dim": 16}
_WINDOW = 12


def llama(heads: int = 6, kv_heads: int = 2, **changes: Any) -> tf.PreTrainedConfig:
    return tf.LlamaConfig(**{**_BASE, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **changes})


SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}

FAMILIES: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama": llama,
    "mistral": lambda: tf.MistralConfig(**_BASE, sliding_window=None),
    "mistral-sliding": lambda: tf.MistralConfig(**_BASE, sliding_window=_WINDOW),
    "qwen2": lambda: tf.Qwen2Config(**_BASE),
    "qwen3": lambda: tf.Qwen3Config(**_WIDE),
    "phi3": lambda: tf.Phi3Config(**_BASE),
    "gemma2": lambda: tf.Gemma2Config(
        **_WIDE, sliding_window=_WINDOW, query_pre_attn_scalar=10, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **{**_WIDE, "num_hidden_layers": 3},
        sliding_window=_WINDOW,
        query_pre_attn_scalar=10,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gpt-oss": lambda: tf.GptOssConfig(
        **_WIDE,
        sliding_window=_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**{k: v for k, v in _BASE.items() if k != "num_key_value_heads"}),
    "gpt2": lambda: tf.GPT2Config(
        n_embd=48,
        n_layer=2,
        n_head=6,
        n_positions=512,
        scale_attn_by_inverse_layer_idx=True,
        **{k: v for k, v in _BASE.items() if k in ("vocab_size", "initializer_range") or k.endswith("token_id")},
    ),
    "olmo2": lambda: tf.Olmo2Config(**_BASE),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(
        **_WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    ),
    "mixtral": lambda: tf.MixtralConfig(**_BASE, num_local_experts=4),
}


def _scaled(kind: str, **more: Any) -> tf.PreTrainedConfig:
    parameters = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **more}
    return llama(hidden_size=96, rope_parameters=parameters)


_ORIGINALLY = {"original_max_position_embeddings": 128}
ROTARY: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "default": llama,
    "linear": lambda: _scaled("linear"),
    "yarn": lambda: _scaled("yarn", **_ORIGINALLY),
    "llama3": lambda: _scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_ORIGINALLY),
    "partial: gpt-neox": FAMILIES["gpt-neox"],
    "partial: phi": lambda: tf.PhiConfig(**_BASE),
    "neighbours: cohere": lambda: tf.CohereConfig(**_BASE),
    "neighbours, partial: glm": lambda: tf.GlmConfig(**_WIDE),
    "two: gemma3": FAMILIES["gemma3"],
    "not in every layer: smollm3": lambda: tf.SmolLM3Config(**_BASE, no_rope_layer_interval=2),
    "sinks: gpt-oss": FAMILIES["gpt-oss"],
    "window: mistral": FAMILIES["mistral-sliding"],
}


def build(config: tf.PreTrainedConfig, device: str = "cpu", seed: int = 0) -> PreTrainedModel:
    """A model with random weights and the attention that counts as unmodified."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return model.to(device)


def portable() -> PreTrainedModel:
    """A model whose weights, and so whose fingerprint, are the same on every machine: random numbers are not."""
    model = build(llama(2, 1, hidden_size=8, intermediate_size=8))
    for i, weight in enumerate(model.parameters()):
        numbers = torch.arange(weight.numel()) * 37 + 11 * i
        exact = ((numbers % 127 - 63) / 128).view_as(weight)
        weight.data.copy_(exact if weight.ndim > 1 else torch.ones_like(weight))
    return model


def hybrid() -> PreTrainedModel:
    from transformers import Lfm2Config

    base = FAMILIES["llama"]().to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return build(
        Lfm2Config(
            **{k: base[k] for k in keys}, num_hidden_layers=2, layer_types=["conv", "full_attention"], eos_token_id=2
        )
    )


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    """Ids that are never special, so that no generation ends early."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def greedy(**more: Any) -> dict[str, Any]:
    """Settings of a short generation that depends on nothing but the model."""
    return {"do_sample": False, "max_new_tokens": 10, **more}


def left_padded(ids: Tensor, padding: list[int]) -> tuple[Tensor, Tensor]:
    """Rows cut to their last columns: row i keeps all but its first padding[i]."""
    mask = torch.ones_like(ids)
    for row, width in enumerate(padding):
        mask[row, :width] = 0
    return ids.masked_fill(mask == 0, 0), mask


class Oracle(NamedTuple):
    logits: Tensor  # [T, V]
    evicted_at: Tensor  # [L, G, T], HELD where held
    excused_from: int  # the first step at which rounding may decide who leaves

    def agrees(self, evicted_at: Tensor) -> bool:
        """The same eviction times, up to the step from which rounding excuses; [L, G, T] in steps."""
        cut = self.excused_from
        return torch.equal(self.evicted_at.clamp(max=cut), evicted_at.long().clamp(max=cut))


@torch.no_grad()
def oracle(
    model: PreTrainedModel,
    ids: Tensor,
    policy: str | Policy,
    size: SizeLike,
    repositioning: list[Repositioning | None] | None = None,
    networks: Sequence[WeightNetwork | None] | None = None,
) -> Oracle:
    """Run one sequence [T] by the definition; `repositioning` of each layer, or None for the model's own positions.

    `networks` has the learned row weights of each layer.
    """
    policy_, size = resolve(policy, size)
    windows = sliding_windows(model, model.config)
    sizes = layer_sizes(policy_, size, windows, [False] * len(windows))
    bounds = [layer_bound(policy_, rows, window) for rows, window in zip(sizes, windows, strict=True)]
    times: dict[int, Tensor] = {}
    margins: list[Tensor] = []

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        run = recurrent(
            query[0].cpu(),
            key[0].cpu(),
            value[0].cpu(),
            bounds[module.layer_idx],
            scaling,
            kwargs.get("softcap"),
            s.cpu() if (s := kwargs.get("s_aux")) is not None else None,
            repositioning[module.layer_idx] if repositioning else None,
            layer=module.layer_idx,
            network=networks[module.layer_idx] if networks else None,
        )
        times[module.layer_idx] = run.evicted_at
        margins.append(run.margin)
        return run.output.transpose(0, 1)[None].to(query.device), None

    with _attention(model, "oracle", attention):
        logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0].cpu()
    close = torch.stack([m.amin(0) for m in margins]).amin(0) < 1e-5
    excused_from = int(close.nonzero()[0]) if close.any() else len(ids)
    groups = max(t.shape[0] for t in times.values())
    return Oracle(logits, torch.stack([times[i].expand(groups, -1) for i in sorted(times)]), excused_from)


@contextmanager
def _attention(model: PreTrainedModel, name: str, function: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
