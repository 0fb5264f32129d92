"""A bounded model in EleutherAI's lm-evaluation-harness.

    python -m msrnn.integrations.lm_eval --model msrnn --model_args pretrained=NAME,size=512 --tasks hellaswag

The harness finds models only in its own package, so this module runs the harness's command with one more model name.
In Python, import this module and call `lm_eval.simple_evaluate(model="msrnn", model_args=…)`.
Without `--device` the model is on CUDA if there is a CUDA device, otherwise on the CPU in float32.
RULER's tasks get the model's tokenizer, also that of a GGUF file.

Requests have the same meaning as for the harness's own `hf` model; with a size larger than the text, answers are the
same. The batch size must be a number: `auto` is not supported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.engine.engine import Engine
from msrnn.engine.offline import full_model_rnn
from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError
from msrnn.hf.generation_settings import Settings
from msrnn.hf.loading import load
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import Policy
from msrnn.size import SizeLike, resolve

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm

    from msrnn.integrations.lm_eval_options import MODEL, with_device, with_tokenizer
except ModuleNotFoundError as error:
    missing = f"the evaluation harness is not installed (no module {error.name}): pip install 'msrnn[lm-eval]'"
    if __name__ == "__main__":
        print(f"msrnn: {missing}", file=sys.stderr)
        sys.exit(2)
    raise ImportError(missing) from error

MOST_SEQUENCES = 2**16  # in a batch: more fit into no memory
DEFAULT_LENGTH = 2048  # the harness's own default, if the model's config states none
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # transformers' own defaults
GENERATION = ("until", "max_gen_toks", "do_sample", "repetition_penalty", *SAMPLING)
# Fields of a model's generation config that are used, or that do not change a text.
CONFIGURED = {"repetition_penalty", "do_sample", "max_length", "max_new_tokens", "use_cache", "cache_implementation"}
CONFIGURED |= {"eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "_from_model_config", *SAMPLING}
Item = TypeVar("Item")
Score = tuple[float, bool]  # log-likelihood, and whether greedy decoding generates the same tokens


@register_model(MODEL)
class BoundedLM(TemplateLM):
    """A `MultiStateRNN` that answers the harness's requests.

    pretrained  a folder, a .gguf file or a name on the hub
    max_length  tokens: longer contexts lose their beginning, longer documents are split
    """

    def __init__(
        self,
        pretrained: str | None = None,
        policy: str | Policy = "tova",
        size: SizeLike = 512,
        device: str = "auto",
        dtype: str | None = None,
        batch_size: int | str = 1,
        state_dtype: str | None = None,
        positions: str = "original",
        max_length: int | None = None,
        max_gen_toks: int = 256,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or not 1 <= int(batch_size) <= MOST_SEQUENCES:
            raise UsageError(
                f"must be a whole number of sequences, from 1 to {MOST_SEQUENCES:,}",
                name="batch_size",
                value=batch_size,
            )
        policy, size = resolve(policy, size)
        model, tokenizer = load(pretrained, device, dtype)
        self.tokenizer: Any = tokenizer
        self.rnn = MultiStateRNN(model, policy, size, state_dtype=state_dtype, positions=positions)
        self.unbounded = not policy.evicts
        self.batch_size = int(batch_size)
        trained_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_length: int = max_length or trained_length or DEFAULT_LENGTH
        self.max_gen_toks = max_gen_toks
        self._device = model.device

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:  # a chat template may have added them already
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows = [self._windows(request.args[0]) for request in requests]
        pairs = [(None, *window) for document in windows for window in document]
        scores = iter(self._loglikelihood_tokens(pairs, disable_tqdm))
        totals = [sum((next(scores)[0] for _ in document), 0.0) for document in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        ids = self.tok_encode(text)
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[Score]:
        """Score continuations. Each distinct context is read once; its state is copied for each continuation."""
        same_context: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            same_context.setdefault(self._cut_context(context, continuation), []).append(index)
        continuations = [continuation for _, _, continuation in requests]
        scores: dict[int, Score] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for contexts in _batches(sorted(same_context, key=len, reverse=True), self.batch_size):
                indices = [same_context[context] for context in contexts]
                for index, score in self._score_contexts(contexts, indices, continuations):
                    scores[index] = score
                    bar.update()
                    if requests[index][0] is not None:  # a window of a document has no key of its own
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], score)
        return [scores[index] for index in range(len(requests))]

    def _cut_context(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """Cut the context from the left to leave room for the continuation, whose last token is not read."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise UsageError(
                f"must be at least {len(continuation)}, the tokens of a continuation",
                name="max_length",
                value=self.max_length,
            )
        return tuple(context[-room:])

    def _score_contexts(
        self, contexts: Sequence[Sequence[int]], indices: list[list[int]], continuations: list[list[int]]
    ) -> Iterator[tuple[int, Score]]:
        """Read a batch of contexts and score their continuations, which `indices` names for each context."""
        state = self.rnn.state(len(contexts))
        ids, mask = self._pad(contexts, left=True)
        logits = self.rnn.read(ids, state, mask, last_only=True)
        pairs = [(row, index) for row, row_indices in enumerate(indices) for index in row_indices]
        pairs.sort(key=lambda pair: len(continuations[pair[1]]))
        for batch in _batches(pairs, self.batch_size):
            rows, chosen = [row for row, _ in batch], [index for _, index in batch]
            scores = self._score_rows(state, logits, rows, [continuations[index] for index in chosen])
            yield from zip(chosen, scores, strict=True)

    def _score_rows(
        self, state: MultiState, logits: Tensor, rows: list[int], continuations: list[list[int]]
    ) -> list[Score]:
        """Score one continuation for each of these sequences of a state; the state is not changed."""
        ids, mask = self._pad(continuations, left=False)
        total, greedy = _score_targets(logits[rows], ids[:, :1], mask[:, :1])
        last = ids.shape[1] - 1
        if last > 0:  # a single token is scored by its context's logits
            state = state.select(rows)
        for start in range(0, last, self.rnn.block):  # the logits of a whole document take too much memory
            stop = min(start + self.rnn.block, last)
            logits = self.rnn.read(ids[:, start:stop], state, mask[:, start:stop])
            more, agrees = _score_targets(logits, ids[:, start + 1 : stop + 1], mask[:, start + 1 : stop + 1])
            total, greedy = total + more, greedy & agrees
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    def _pad(self, sequences: Sequence[Sequence[int]], left: bool) -> tuple[Tensor, Tensor]:
        """Ids and mask [B, T]; padding is never read."""
        width = max(map(len, sequences))
        ids, mask = torch.zeros(2, len(sequences), width, dtype=torch.long)
        for i, one in enumerate(sequences):
            columns = slice(width - len(one), width) if left else slice(len(one))
            ids[i, columns], mask[i, columns] = torch.tensor(one, dtype=torch.long), 1
        return ids.to(self._device), mask.to(self._device)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to the first stop sequence."""
        params = [self._sampling_params(request.args[1]) for request in requests]
        contexts = [
            self._encode_end(request.args[0], self.max_length - some.max_tokens)
            for request, some in zip(requests, params, strict=True)
        ]
        texts = [""] * len(requests)
        engine = self._engine(max((len(c) + p.max_tokens for c, p in zip(contexts, params, strict=True)), default=1))
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for number, answered in engine.answers(contexts, params):
                (answer,) = answered.answers
                if answer.error:
                    raise UsageError(f"request {number + 1}: {answer.error}; use another dtype")
                text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                texts[number] = postprocess_generated_text(text, [*params[number].stop], None)
                self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
                bar.update()
        return texts

    def _engine(self, tokens: int) -> Engine:
        """For contexts and continuations of at most `tokens` tokens together."""
        rnn = full_model_rnn(self.rnn.model, tokens) if self.unbounded else self.rnn
        return Engine.offline(rnn, self.batch_size, _WithSpecialTokens(self.tokenizer))

    def _sampling_params(self, given: dict[str, Any]) -> SamplingParams:
        """Sampling parameters of the request, then those of the model's generation config, as in transformers."""
        kwargs: dict[str, Any] = normalize_gen_kwargs(given, self.max_gen_toks)
        if unknown := sorted(kwargs.keys() - GENERATION):
            raise UsageError(f"generation kwargs {', '.join(unknown)}: not supported; use {', '.join(GENERATION)}")
        configured = self.rnn.model.generation_config.to_diff_dict()
        if unknown := sorted(name for name, value in configured.items() if name not in CONFIGURED and value):
            raise UsageError(
                f"the model's generation config has {', '.join(unknown)}, which is not supported here; set it to None"
            )
        settings = Settings(self.rnn.model, kwargs)
        penalty = settings["repetition_penalty"]
        sampling: dict[str, Any] = {"temperature": 0.0}
        if kwargs["do_sample"]:
            own = {name: settings[name] for name in SAMPLING}
            sampling = {name: SAMPLING[name] if value is None else value for name, value in own.items()}
            sampling["seed"] = int(torch.randint(2**62, ()))  # the harness seeds torch
        stop = handle_stop_sequences(kwargs["until"], eos=self.tokenizer.decode([self.eot_token_id]))
        return SamplingParams(
            max_tokens=kwargs["max_gen_toks"],
            stop=[text for text in stop if text],
            repetition_penalty=1.0 if penalty is None else float(penalty),
            **sampling,
        )

    def _encode_end(self, context: str, room: int) -> list[int]:
        """The last tokens of a context."""
        if room < 1:
            raise UsageError(
                "leaves no room for a context",
                name="max_length",
                value=self.max_length,
                advice="must be more than the tokens to generate",
            )
        return self.tok_encode(context)[-room:] or [self.prefix_token_id]


class _WithSpecialTokens:
    """A tokenizer whose text has the special tokens as well: a stop sequence may contain them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_token_id

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(ids)
        return text


def _score_targets(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sequence of targets [B, T], without padding: the sum of log-probabilities, and whether all are argmax."""
    logprobs = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    padding = mask == 0
    return logprobs.masked_fill(padding, 0.0).sum(-1), ((logits.argmax(-1) == targets) | padding).all(-1)


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def main() -> None:
    """Run the harness's own command, with one more model. Bad input to the model is one line, with exit code 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        sys.argv[1:] = with_tokenizer(with_device(sys.argv[1:]))
        cli_evaluate()
    except UsageError as error:
        print("msrnn:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
