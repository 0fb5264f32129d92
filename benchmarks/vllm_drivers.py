"""The engines of `benchmarks.vllm`: vLLM as it is, vLLM with msrnn's plug-in, and msrnn's own engine."""

from __future__ import annotations

import random
import tempfile
from importlib.metadata import entry_points
from typing import Any

from benchmarks.vllm_loads import Job, Load, Served
from msrnn.evaluation.benchmark.random_weights import SHAPES, random_model

SLOTS = 448  # requests that a bounded engine runs at once
SPARE = 8  # tokens beyond the size, so that a state is full
MEMORY = 0.93  # of the GPU, for vLLM
POLICY = "tova"


class VLLM:
    """vLLM in processes of its own, as it runs by default."""

    def __init__(self, shape: str, size: int | None, kv_cache_dtype: str) -> None:
        from transformers import LlamaConfig
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.held = None if size is None else size + SPARE
        self._folder = tempfile.TemporaryDirectory()
        config = LlamaConfig(**SHAPES[shape], architectures=["LlamaForCausalLM"])
        config.save_pretrained(self._folder.name)
        sizes = [1, 8, *range(32, 513, 32)] if size is None else [1, 8, 64, 256, 384, SLOTS]
        bounded: dict[str, Any] = {}
        if size is not None:
            if "msrnn" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
                raise RuntimeError("vLLM does not find the plug-in, and would ignore its option: pip install .")
            bounded = {
                "additional_config": {"msrnn": {"policy": POLICY, "size": size}},
                "num_gpu_blocks_override": SLOTS + 1,
                "max_num_batched_tokens": 2048,
                "long_prefill_token_threshold": 256,  # several prompts are read at once
            }
        self._llm = LLM(
            model=self._folder.name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=SHAPES[shape]["max_position_embeddings"],
            max_num_seqs=512 if size is None else SLOTS,
            gpu_memory_utilization=MEMORY,
            enable_prefix_caching=False,
            compilation_config={"cudagraph_capture_sizes": sizes},
            **bounded,
        )
        self._engine, self._cache = self._llm.llm_engine, self._llm.llm_engine.vllm_config.cache_config
        self._vocabulary, self._draw = config.vocab_size, random.Random(1)
        self._params, self._kind = SamplingParams, RequestOutputKind.DELTA
        self._running: dict[str, bool] = {}  # whether it has begun
        self._count = 0

    def count_slots(self, load: Load) -> int:
        if self.held is not None:
            return SLOTS
        tokens = self._cache.num_gpu_blocks * self._cache.block_size
        return min(512, int(tokens / load.mean_context)) + 8  # some that wait, so that memory is always full

    def add(self, job: Job) -> str:
        number, self._count = str(self._count), self._count + 1
        tokens = self._draw.choices(range(self._vocabulary), k=job.prompt)
        params = self._params(
            temperature=0, max_tokens=job.answer, ignore_eos=True, detokenize=False, output_kind=self._kind
        )
        self._engine.add_request(number, {"prompt_token_ids": tokens}, params)
        self._running[number] = False
        return number

    def step(self) -> Served:
        tokens = ended = 0
        began: list[str] = []
        for output in self._engine.step():
            new = len(output.outputs[0].token_ids)
            tokens += new
            if new and not self._running[output.request_id]:
                self._running[output.request_id] = True
                began.append(output.request_id)
            if output.finished:
                ended += 1
                del self._running[output.request_id]
        return Served(tokens, began, ended)

    def clear(self) -> None:
        self._engine.abort_request([*self._running])
        self._running.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


class Msrnn:
    """msrnn's own engine, captured; compiled or not. Rows of 8 bits leave room for twice the batch slots."""

    def __init__(self, shape: str, size: int, compiles: bool, state_dtype: str | None) -> None:
        import msrnn

        self.held, self._slots = size + SPARE, SLOTS * (1 if state_dtype is None else 2)
        rnn = msrnn.MultiStateRNN(random_model(shape), POLICY, size, compile=compiles, state_dtype=state_dtype)
        self._engine, self._params = msrnn.Engine(rnn, self._slots), msrnn.SamplingParams
        self._engine.warm_up()
        self._vocabulary, self._draw = SHAPES[shape]["vocab_size"], random.Random(1)
        self._running: dict[Any, bool] = {}

    def count_slots(self, load: Load) -> int:
        return self._slots

    def add(self, job: Job) -> Any:
        tokens = self._draw.choices(range(self._vocabulary), k=job.prompt)
        params = self._params(temperature=0, max_tokens=job.answer, ignore_eos=True)
        request = self._engine.request(tokens, params)
        self._engine.add(request)
        self._running[request] = False
        return request

    def step(self) -> Served:
        tokens = ended = 0
        began: list[Any] = []
        for event in self._engine.step():
            if event.token is not None:
                tokens += 1
                if not self._running[event.request]:
                    self._running[event.request] = True
                    began.append(event.request)
            if event.finish_reason:
                ended += 1
                del self._running[event.request]
        return Served(tokens, began, ended)

    def clear(self) -> None:
        for request in self._running:
            request.cancel()
        self._running.clear()
        while not self._engine.idle:
            self._engine.step()
