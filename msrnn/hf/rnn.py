"""MultiStateRNN: a decoder as a recurrent network. An empty state, prefill, decode steps, generation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.checks import check_choice, check_count
from msrnn.core.rope import ORIGINAL, Gap
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.block_reader import BlockReader
from msrnn.hf.cache import MultiStateCache
from msrnn.hf.cuda_graphs import Graphs
from msrnn.hf.generation import Continuation, redirect_forward
from msrnn.hf.generation_settings import Settings
from msrnn.hf.handover import begin_block, end_block, give_back, hand_over
from msrnn.hf.inputs import check_input, count_tokens
from msrnn.hf.recalling_reader import RecallingReader
from msrnn.hf.sequence_ends import SequenceEnds
from msrnn.hf.specify import state_spec
from msrnn.hf.state_conversion import convert_state
from msrnn.hf.tensor_parallel import check_same_input
from msrnn.hf.wavefront import read_columns
from msrnn.layer import Record
from msrnn.policy import Policy
from msrnn.recall import PromptRecall, Recall, Recalling
from msrnn.size import SizeLike

DEFAULT_BLOCK = 512
STEPWISE_BLOCK = 64  # where a GPU reads a block token by token: a larger graph takes too long to capture


class MultiStateRNN:
    """A Hugging Face decoder with a bounded state: `size` KV cache rows per layer, whatever the length of the text.

    The model is put into evaluation mode and its attention becomes "msrnn"; its weights are untouched.

    policy       a name such as "tova" or "window+4", or a `Policy`: which KV row is evicted
    size         KV rows per layer; or a list, a number for each layer (None: this layer keeps every row); or a mean and
                 the budget that divides it among the layers, as in "512:upper"; or a `Size`. None alone only with
                 policy "full", which evicts nothing. ("echo:upper", 512) means ("echo", "512:upper")
    positions    which position ids the kept tokens get, for texts longer than the training length: "original",
                 "compressed" (gaps above 10 become ln ln gap; "compressed:ln", "compressed:sqrt"; "compressed:16": at
                 most 16), "fitted" (the largest gaps that always fit the training length), "compact" (0, 1, 2, …), or
                 a function of one gap
    state_dtype  "int8" or "fp8": rows are quantized as they are appended, and take half the bytes of 16-bit rows
    backend      "auto", "torch", "numba" (CPU) or "triton" (GPU)
    compile      whether torch.compile compiles the model's code between the attention kernels of a captured CUDA graph:
                 takes seconds once, then decode steps take about a tenth less time
    chunk        tokens that are scored at once inside a layer. It bounds memory, and does not change the result
    block        tokens of a sequence that pass through the model at once; bounds memory, does not change the result
    recall       the number of evicted rows that come back, for each KV head, when `generate` or `read` asks for them;
                 every row is then archived. 0: none; or a `Recall`, which says where the archive is
    recall_every tokens that share their recalled rows, in what `generate` reads and writes
    recall_while_reading  the same for the text before that; None: it is read without recall
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy = "tova",
        size: SizeLike = 512,
        *,
        positions: str | Gap = ORIGINAL,
        state_dtype: str | torch.dtype | None = None,
        backend: str = "auto",
        compile: bool = False,
        chunk: int | None = None,
        block: int | None = None,
        recall: int | Recall = 0,
        recall_every: int = 1,
        recall_while_reading: int | None = None,
    ) -> None:
        if block is not None:
            check_count("block", block, of="tokens")
        if recall_while_reading is not None:
            check_count("recall_while_reading", recall_while_reading, of="tokens")
        options: Any = {"positions": positions, "state_dtype": state_dtype, "backend": backend, "chunk": chunk}
        if not isinstance(recall, Recall):
            check_count("recall", recall, least=0, of="KV rows")
        elif recall_every != 1:
            raise UsageError("a Recall has it already", name="recall_every", value=recall_every, advice="leave it out")
        if not recall and recall_while_reading is not None:
            raise UsageError(
                "needs recall, the number of rows", name="recall_while_reading", value=recall_while_reading
            )
        chosen = recall if isinstance(recall, Recall) else Recall(recall, recall_every) if recall else None
        self.spec = state_spec(model, policy, size, **options, in_blocks=True, recall=chosen)
        self.recall_while_reading = recall_while_reading
        hand_over(model, self)
        self.model = model
        stepwise = self.spec.decodes_repositioned
        self.block = block or (STEPWISE_BLOCK if stepwise else DEFAULT_BLOCK)
        self._graphs = Graphs(model, self.spec, compile)
        self._blocks = BlockReader(model, self.spec, self._graphs, block, self.block)
        self._recalling = RecallingReader(model, self.spec, self._graphs, self.block)

    def __repr__(self) -> str:
        return f"MultiStateRNN({self.spec.summary}, device={str(self.device)!r})"

    @property
    def device(self) -> torch.device:
        """The device of the model's first weights."""
        device: torch.device = self.model.device
        return device

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    def cache(self) -> MultiStateCache:
        """An empty cache with the same policy, size and options, for `model.generate(past_key_values=...)`."""
        if self.spec.recall is not None:
            raise UsageError(
                "model.generate does not say which tokens ask, so a cache cannot recall",
                name="recall",
                value=self.spec.recall.rows,
                advice="use rnn.generate",
            )
        return MultiStateCache.from_spec(self.model, self.spec)

    def detach(self) -> None:
        """Restore the model as it was before it was first wrapped: its attention implementation and training mode.

        States, and other objects that wrap this model, cannot be used with it any more. The end of a `with` block does
        the same, unless an object that was made before the block still wraps the model.
        """
        self.release()
        give_back(self.model)

    def __enter__(self) -> MultiStateRNN:
        begin_block(self.model, self)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        end_block(self.model, self)

    def state(self, batch_size: int = 1, size: int | None = None) -> MultiState:
        """An empty state for `batch_size` sequences; a bounded one allocates all its memory now, and no more later.

        With a `size`, they may hold fewer KV rows than this RNN's; `MultiState.limit_size` says more.
        """
        check_count("batch_size", batch_size, of="sequences")
        if size is not None:
            self.spec.check_size(size)
        state = self._graphs.state(batch_size)
        if size is not None:
            state.limit_size(size)
        return state

    def block_of(self, batch_size: int) -> int:
        """Tokens of each sequence that pass through the model at once: as given, or fewer in a larger batch."""
        return self._blocks.wave(batch_size, last_only=True).block

    @property
    def prompt_recall(self) -> PromptRecall | None:
        """Which tokens of a prompt recall; None: nothing is archived."""
        recall = self.spec.recall
        return None if recall is None else PromptRecall(recall, self.recall_while_reading)

    def release(self) -> None:
        """Free the GPU memory that captured graphs keep for the next state of their batch size."""
        self._graphs.release()

    @property
    def captures(self) -> bool:
        """Whether steps and blocks are captured as CUDA graphs."""
        return self._graphs.possible

    def compiling_rests(self) -> AbstractContextManager[None]:
        """In this `with` block, an RNN with `compile=True` also compiles reads that are shorter than a block of tokens.

        These are short texts and the rest of long ones. It pays where many texts follow, as in an engine.
        """
        return self._graphs.compiling_rests()

    def new_graphs(self) -> Graphs:
        """Graphs like those of this RNN, on buffers of their own."""
        return Graphs(self.model, self.spec, self._graphs.compiles)

    def load_state(self, path: str | os.PathLike[str]) -> MultiState:
        """Load a state that `state.save` wrote for this model, policy, size, dtype and positions."""
        return MultiState.load_fitting(path, self.spec.fingerprint, self.spec.state)

    def convert_state(self, state: MultiState) -> MultiState:
        """Copy a state of other `positions`, or of another `horizon` or `first` of this policy, for use with this RNN.

        A state keeps keys as the model wrote them, and positions as in the text, so these may change between any two
        tokens. Evicted tokens do not come back, and recalled rows stay recalled until the next block.
        """
        return convert_state(state, self.spec)

    def select(self, state: MultiState, sequences: Sequence[int] | Tensor) -> MultiState:
        """`state.select`, into buffers that already have a captured graph, if there are any."""
        index = state.sequence_index(sequences)
        return self._graphs.select(state, index)

    @torch.no_grad()
    def step(self, input_ids: Tensor, state: MultiState, attention_mask: Tensor | None = None) -> Tensor:
        """One decode step, one token per sequence: [B, 1] -> logits [B, 1, V].

        Rows where `attention_mask` [B, 1] is 0 read nothing: their states do not change, and their logits are
        meaningless.
        """
        if isinstance(input_ids, Tensor) and input_ids.ndim == 2 and input_ids.shape[1] != 1:
            raise UsageError(f"input_ids of {input_ids.shape[1]} columns: step reads one token per sequence; use read")
        ids, mask = check_input(self.model, self.spec, input_ids, state, attention_mask)
        recalling = self.spec.recalling
        alone = state.marked is not None or (recalling is not None and recalling.every > 1)
        graph = None if alone else self._graphs.of(state, recalling=recalling)
        with state.reading(1):
            if graph is None:
                return self.forward(ids, state, mask, last_only=True, recalling=recalling)
            return graph(ids, mask)[0].clone()

    @torch.no_grad()
    def read(
        self,
        input_ids: Tensor,
        state: MultiState,
        attention_mask: Tensor | None = None,
        last_only: bool = False,
        on_block: Callable[[int], None] | None = None,
        record: Callable[[int], Record] | None = None,
        protect: bool = False,
        recall_every: int | None = None,
    ) -> Tensor:
        """Read any number of tokens [B, T] (prefill); the state advances. -> logits [B, T, V], or the last [B, 1, V].

        `attention_mask` [B, T] covers these columns, 0 for padding. The result does not depend on how a text is split
        into calls. `on_block` is called with the number of columns that were read since. `record(layer)` returns a
        function that receives the layer's eviction times. With `protect`, these tokens are never evicted, until
        `state.release()`; more than fit are refused before a token is read. With `recall_every`, blocks of that
        many tokens recall archived rows; they begin at multiples of it and at the beginning of the call. Without it,
        these tokens see held rows only.
        """
        input_ids, mask = check_input(self.model, self.spec, input_ids, state, attention_mask)
        check_same_input(input_ids, self.spec.model.shards, recall_every=recall_every)
        if recall_every is not None:
            self._recalling.check(recall_every, mask, record)
        with self._protecting(state, input_ids, mask) if protect else nullcontext():
            if recall_every is not None:
                return self._recalling.read(input_ids, state, mask, last_only, on_block, recall_every)
            return self._blocks.read(input_ids, state, mask, last_only, on_block, record)

    def read_prompt(self, input_ids: Tensor, state: MultiState, mask: Tensor | None, rest: int = 0) -> Tensor:
        """Read a prompt, without its last `rest` tokens, which the caller has -> its last logits.

        Where rows are archived, the last tokens of a prompt recall as a question does.
        """
        if self.prompt_recall is None:
            return self.read(input_ids, state, mask, last_only=True)
        logits, begin = None, 0
        for end, recalling in self.prompt_recall.parts(input_ids.shape[1] + rest):
            ids, part = input_ids[:, begin:end], None if mask is None else mask[:, begin:end]
            every = None if recalling is None or not (part is None or bool(part.any())) else recalling.every
            if ids.shape[1]:
                logits = self.read(ids, state, part, last_only=True, recall_every=every)
            begin = end
        assert logits is not None
        return logits

    def read_answer(self, input_ids: Tensor, state: MultiState, mask: Tensor | None) -> Tensor:
        """Read tokens of an answer -> the last logits. Where rows are archived, they recall as steps do."""
        every = self.spec.recall.every if self.spec.recall else None
        return self.read(input_ids, state, mask, last_only=True, recall_every=every)

    def _protecting(self, state: MultiState, input_ids: Tensor, mask: Tensor | None) -> AbstractContextManager[None]:
        self.spec.check_protect()
        return state.protecting(count_tokens(input_ids, mask))

    def forward(
        self,
        ids: Tensor,
        state: MultiState,
        mask: Tensor | None,
        last_only: bool,
        record: Callable[[int], Record] | None = None,
        recalling: Recalling | None = None,
    ) -> Tensor:
        """One forward pass over columns that fit into one block: no checks, no captured graph, no count."""
        return read_columns(self.model, self.spec, state, ids, mask, last_only, record, recalling)

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, state: MultiState | None = None, *, protect: str = "none", **kwargs: Any
    ) -> Any:
        """transformers' `generate` over a bounded state: its arguments, its result.

        With a `state`, `input_ids` are the new tokens only, and the state advances over them and over the answer of
        each sequence, its stop token included; later columns are padding. An interrupted call leaves the state
        after the tokens it has read (`state.seen`), or unusable if it stopped inside a forward pass. Logits processors
        and stopping criteria see the tokens of this call only, not what the state has read before. Without an
        `attention_mask`, every id is a token. With protect="prompt", `input_ids` are never evicted, until
        `state.release()`. What cannot be done is refused before a token is read.
        """
        check_choice("protect", protect, ("none", "prompt"))
        settings = Settings(self.model, kwargs)
        settings.check()
        continues = state is not None
        if state is None:
            state = self.state(input_ids.shape[0] if isinstance(input_ids, Tensor) and input_ids.ndim == 2 else 1)
        input_ids, mask = check_input(self.model, self.spec, input_ids, state, kwargs.get("attention_mask"))
        if mask is not None and not mask[:, -1].all():
            raise UsageError("attention_mask: generate continues from the last column, so pad on the left")
        check_same_input(input_ids, self.spec.model.shards, samples=bool(settings["do_sample"]))
        settings.check_state(self.spec, state, continues)
        beams, copies = settings.beams, max(settings.sequences, settings.beams)
        ends = SequenceEnds(settings) if continues and beams == 1 else None
        continuation = Continuation(self.model, self, state, input_ids.shape[1], copies, ends)
        forced: dict[str, Any] = {"use_cache": True, **({"return_dict_in_generate": True} if continues else {})}
        if settings["prefill_chunk_size"] is not None:
            forced["prefill_chunk_size"] = None  # msrnn reads in blocks of its own
        arguments = settings.arguments(**forced)
        if ends is not None:
            arguments["stopping_criteria"] = ends.criteria
        with self._protecting(state, input_ids, mask) if protect == "prompt" else nullcontext():
            try:
                out = redirect_forward(self.model, continuation).generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids) if mask is None else mask,
                    past_key_values=continuation.cache,
                    **arguments,
                )
            finally:
                continuation.stop()
            if not continues:
                return out
            continuation.finish(out, input_ids.shape[1], pad=settings.pad_token)
        return out if settings["return_dict_in_generate"] else out.sequences
