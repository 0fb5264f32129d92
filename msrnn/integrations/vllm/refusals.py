"""What of vLLM does not go together with a bounded state. It is refused before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm.logger import init_logger

from msrnn.errors import UsageError
from msrnn.integrations.vllm.spec import BLOCK_TOKENS
from msrnn.integrations.vllm_options import Options, read_options

logger = init_logger("vllm.msrnn")  # vLLM configures loggers below its own name


class Refusal(NamedTuple):
    name: str
    value: Any
    reason: str
    advice: str


def check_config(vllm_config: Any) -> Options | None:
    """The options in a configuration of vLLM; None: msrnn is not asked for, and nothing is refused."""
    options = read_options(vllm_config.additional_config)
    if options is None:
        return None
    for refusal in find_refusals(vllm_config):
        raise UsageError(refusal.reason, name=refusal.name, value=refusal.value, advice=refusal.advice)
    bound = options.bound
    logger.info_once("msrnn: policy %s, %d KV rows per request in every layer", bound.policy.name, bound.size)
    if vllm_config.cache_config.enable_prefix_caching:
        logger.info_once("msrnn: prefix caching has no effect, since a page is no prefix of a longer text's page")
    return options


def find_refusals(vllm_config: Any) -> Iterator[Refusal]:
    yield from _find_in_model(vllm_config)
    yield from _find_in_engine(vllm_config)
    yield from _find_in_parallel(vllm_config)


def _find_in_model(config: Any) -> Iterator[Refusal]:
    model, other = config.model_config, "use another model, or msrnn's own engine"
    kinds = {
        "use_mla": "latent rows of multi-head latent attention cannot be bounded",
        "is_hybrid": "layers with a state of their own beside attention are not supported",
        "is_encoder_decoder": "an encoder's rows are read by every token, so none may be evicted",
        "is_multimodal_model": "inputs other than text are not supported",
        "is_diffusion": "tokens are not read in order",
    }
    for name, reason in kinds.items():
        if getattr(model, name):
            yield Refusal("model", model.model, f"{reason} ({name})", other)
    if model.runner_type != "generate":
        yield Refusal("runner", model.runner_type, "only text generation is supported", "use --runner generate")
    if model.max_model_len > BLOCK_TOKENS:
        yield Refusal("max_model_len", model.max_model_len, f"must be at most {BLOCK_TOKENS}", "lower it")
    if model.enable_sleep_mode:
        yield Refusal("enable_sleep_mode", True, "sleeping discards the states of running requests", "leave it out")
    if config.device_config.device_type == "cpu" and str(model.dtype) != "torch.float32":
        yield Refusal("dtype", model.dtype, "a CPU computes bounded states in float32", "use --dtype float32")


_OUT = "leave it out"


def _find_in_engine(config: Any) -> Iterator[Refusal]:
    if config.use_v2_model_runner:
        advice = "set VLLM_USE_V2_MODEL_RUNNER=0"
        yield Refusal("use_v2_model_runner", True, "Model Runner V2 has not been tested", advice)
    cache, reason = config.cache_config, "rows in a page have the dtype that the model computes in"
    if cache.cache_dtype not in ("auto", str(config.model_config.dtype).removeprefix("torch.")):
        yield Refusal("kv_cache_dtype", cache.cache_dtype, reason, "use --kv-cache-dtype auto")
    if cache.kv_sharing_fast_prefill:
        yield Refusal("kv_sharing_fast_prefill", True, "layers that share KV rows are not supported", _OUT)
    if config.speculative_config is not None:
        reason = "a page cannot give back tokens that were rejected"
        yield Refusal("speculative_config", config.speculative_config.method, reason, _OUT)
    if config.kv_transfer_config is not None:
        reason = "KV connectors move blocks of a growing cache"
        yield Refusal("kv_transfer_config", config.kv_transfer_config.kv_connector, reason, _OUT)
    holder = getattr(config, "aux_output_config", config.model_config)  # before vLLM 0.32, the model's
    if holder.enable_return_routed_experts:
        yield Refusal("enable_return_routed_experts", True, "it is stored by KV slot, which a page has not", _OUT)
    if config.ec_transfer_config is not None:
        yield Refusal("ec_transfer_config", config.ec_transfer_config.ec_connector, "encoders are not supported", _OUT)


def _find_in_parallel(config: Any) -> Iterator[Refusal]:
    parallel = config.parallel_config
    ranks, heads = parallel.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    if heads % ranks:
        reason = f"the model has {heads} KV heads, and each process must have whole ones, of its own"
        yield Refusal("tensor_parallel_size", ranks, reason, "use a number that divides them")
    reason = "it has not been tested"
    if ranks > 1 and config.device_config.device_type != "cpu":
        yield Refusal("tensor_parallel_size", ranks, f"{reason} on this device", "use 1")
    for kind in ("pipeline", "data", "decode_context", "prefill_context"):
        name = f"{kind}_parallel_size"
        if getattr(parallel, name) > 1:
            yield Refusal(name, getattr(parallel, name), reason, "use 1")
    if parallel.use_ubatching:
        yield Refusal("enable_dbo", parallel.enable_dbo, "a step must be one batch", _OUT)
