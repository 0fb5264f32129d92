"""Problems that are solved step by step, by policy and size, with or without the prompt protected from eviction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.core.protection import count_room
from msrnn.engine.engine import Engine
from msrnn.engine.offline import full_model_rnn
from msrnn.engine.requests import SamplingParams
from msrnn.evaluation.cells import FULL_MODEL, Cell
from msrnn.evaluation.data.final_answers import extract_answers, extract_boxed, extract_number, is_same_number
from msrnn.evaluation.data.problems import GSM8K
from msrnn.evaluation.data.reasoning_prompts import AskedProblems, find_end
from msrnn.evaluation.environment import backend_names, model_key
from msrnn.evaluation.generation import answer_prompts
from msrnn.evaluation.schemas import Schema, Text, check_of
from msrnn.evaluation.store import Record
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.evaluation.tasks.math_verifier import MathVerifier
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.stop_tokens import stop_tokens_of

NAME = "reasoning"
NONE, PROMPT = PROTECT = ("none", "prompt")
SCORING = 2  # the version of extraction and comparison: answers that another one has scored are scored again
MOST_PROTECTED = 3, 4  # of the KV rows of a layer: the rest is for the answer


class ReplySchema(Schema):
    policy: Text
    size: int | None
    protect: Text
    item: Text
    dataset: Text
    sample: int
    answer: Text
    expected: list[Text]
    extracted: list[Text | None]
    right: list[bool]
    scoring: int
    tokens: int
    answer_tokens: int
    ended: bool
    protected: int
    fingerprint: Text
    dtype: Text
    positions: Text


CHECK = check_of(ReplySchema)


class Case(NamedTuple):
    """A policy and a size, and what is protected from eviction while an answer is generated."""

    policy: str
    size: int | None  # None: full, which has no limit
    protect: str = NONE

    @property
    def cell(self) -> Cell:
        return Cell(self.policy, self.size)

    @property
    def without_protection(self) -> Case:
        return self._replace(protect=NONE)

    @property
    def without_recall(self) -> Case:
        return Case(*self.cell.without_recall, self.protect)

    @property
    def label(self) -> str:
        return self.cell.label + (", prompt protected" if self.protect == PROMPT else "")

    @property
    def key(self) -> Record:
        return {**self.cell.key, "protect": self.protect}


FULL_CASE = Case(*FULL_MODEL)


class Reply(NamedTuple):
    """An answer to a prompt in numbers."""

    right: tuple[bool, ...]  # of each problem
    tokens: int
    ended: bool  # with a stop token, and not at the limit
    protected: float  # the share of the prompt that was protected


class Drawing(NamedTuple):
    """How answers are drawn; greedy ones do not depend on the seed."""

    samples: int
    temperature: float
    seed: int
    max_new_tokens: int  # for each problem of a prompt

    @property
    def key(self) -> Record:
        seed = self.seed if self.temperature else 0
        return {"temperature": self.temperature, "seed": seed, "max_new_tokens": self.max_new_tokens}

    def params(self, asked: AskedProblems, sample: int, stop_tokens: Sequence[int], chat: bool) -> SamplingParams:
        """The seed depends on the prompt and the number of the sample, so that all versions draw with the same."""
        name = f"{self.seed}/{asked.key}/{sample}"
        return SamplingParams(
            max_tokens=self.max_new_tokens * len(asked.problems),
            temperature=self.temperature,
            seed=int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]),
            stop=() if chat else (find_end(len(asked.problems)),),
            stop_token_ids=stop_tokens,
            ignore_eos=True,  # the stop tokens are all of them
        )


Results = dict[Case, list[Reply]]  # for each prompt, its samples


def make_rnn(cell: Cell, model: PreTrainedModel, positions: str, tokens: int) -> MultiStateRNN:
    """The model that answers; the full one has slots for the longest prompt and its answer."""
    if cell.size is None:
        return full_model_rnn(model, tokens)
    return MultiStateRNN(model, **cell.options, positions=positions)


def count_protected(rnn: MultiStateRNN, tokens: int) -> int:
    """How many first tokens of a prompt are protected: all, or as many as leave the answer a quarter of each layer."""
    share, of = MOST_PROTECTED
    rooms = [
        min(bound.policy.first + count_room(bound), bound.size * share // of)
        for bound in rnn.spec.bounds
        if bound is not None and bound.protects
    ]
    return min([tokens, *rooms])


class Reasoning(Task[Case, str, Reply]):
    """One model on prompts. An item is a sample of a prompt."""

    unit = "answers"
    gpu_batch, cpu_batch = 128, 8

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        asked: Sequence[AskedProblems],
        drawing: Drawing,
        chat: bool,
        positions: str,
        metadata: Record,
    ) -> None:
        self.drawing, self.stop_tokens = drawing, sorted(stop_tokens_of(model, tokenizer))
        self.key = {**model_key(model), "stop_tokens": self.stop_tokens, "positions": positions, **drawing.key}
        self.metadata, self.tokenizer, self.positions, self.chat = metadata, tokenizer, positions, chat
        self.asked = {one.key: one for one in asked}

    @property
    def tokens(self) -> int:
        """Of the longest prompt with its answer."""
        return max(map(self._count_tokens, self.asked.values()))

    def cell_of(self, record: Record) -> Case:
        return Case(record["policy"], record["size"], record["protect"])

    def items(self, cell: Case) -> list[str]:
        return [f"{key}-{sample}" for key in self.asked for sample in range(self.drawing.samples)]

    def read(self, records: list[Record]) -> dict[str, Reply]:
        with MathVerifier() as verifier:
            return {
                record["item"]: Reply(
                    tuple(record["right"] if record["scoring"] == SCORING else score_record(record, verifier)["right"]),
                    record["answer_tokens"],
                    record["ended"],
                    record["protected"] / record["tokens"],
                )
                for record in records
            }

    def work(self, job: Job[Case, str]) -> int:
        return sum(self._count_tokens(self._find_asked(item)) for item in job.items)

    def batches(self, job: Job[Case, str]) -> list[list[str]]:
        """All at once: the engine keeps its batch filled."""
        return [job.items]

    def prepare(self, job: Job[Case, str], model: PreTrainedModel) -> Compute[str]:
        rnn = make_rnn(job.cell.cell, model, self.positions, self.tokens)
        backend = {"backend": backend_names(rnn)}

        def compute(items: list[str], on_tokens: OnTokens) -> Iterator[Record]:
            asked = [self._find_asked(item) for item in items]
            samples = [int(item.rpartition("-")[2]) for item in items]
            prompts = [one.ids for one in asked]
            params = [
                self.drawing.params(one, sample, self.stop_tokens, self.chat)
                for one, sample in zip(asked, samples, strict=True)
            ]
            protect = [count_protected(rnn, len(ids)) if job.cell.protect == PROMPT else 0 for ids in prompts]
            engine = Engine.offline(rnn, job.batch, self.tokenizer)
            with MathVerifier() as verifier:
                for number, tokens, seconds in answer_prompts(engine, prompts, params, on_tokens, protect):
                    one = asked[number]
                    reply = {
                        "item": items[number],
                        "dataset": one.dataset,
                        "problems": [problem.text for problem in one.problems],
                        "expected": [problem.expected for problem in one.problems],
                        "sample": samples[number],
                        "answer": self._decode(tokens, one),
                        "tokens": len(one.ids),
                        "answer_tokens": len(tokens),
                        "ended": len(tokens) < params[number].max_tokens,
                        "protected": protect[number],
                        "seconds": seconds,
                    }
                    yield {**reply, **score_record(reply, verifier), **backend}

        return compute

    def _find_asked(self, item: str) -> AskedProblems:
        return self.asked[item.rpartition("-")[0]]

    def _count_tokens(self, asked: AskedProblems) -> int:
        return len(asked.ids) + self.drawing.max_new_tokens * len(asked.problems)

    def _decode(self, tokens: Sequence[int], asked: AskedProblems) -> str:
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return (text if self.chat else text.partition(find_end(len(asked.problems)))[0]).strip()


def score_record(record: Record, verifier: MathVerifier) -> Record:
    """The final answers of a record, and which of them are right. A problem without an answer is not solved."""
    is_number = record["dataset"] == GSM8K
    extract = extract_number if is_number else extract_boxed
    same = is_same_number if is_number else verifier.is_same
    found = extract_answers(record["answer"], len(record["expected"]), extract)
    right = [one is not None and same(one, true) for one, true in zip(found, record["expected"], strict=True)]
    return {"extracted": found, "right": right, "scoring": SCORING}
