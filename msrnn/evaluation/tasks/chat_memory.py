"""Questions about a conversation that lasts months: the full model, a bounded state, and one that recalls.

The conversation is read once into a state. Each question is asked from a copy of that state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.evaluation.cells import Cell, cell_of
from msrnn.evaluation.data.chat_prompts import AskedQuestion
from msrnn.evaluation.environment import backend_names, model_key
from msrnn.evaluation.schemas import Schema, Text, check_of
from msrnn.evaluation.store import Record
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.evaluation.tasks.chat_memory_scores import score_answer
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.stop_tokens import stop_tokens_of
from msrnn.policy import FULL

NAME = "chat-memory"
FULL_BLOCK = 4096  # tokens: the full model reads a long conversation in few and large steps


class AnswerSchema(Schema):
    policy: Text
    size: int | None
    item: Text
    conversation: Text
    category: int
    question: Text
    answer: Text
    expected: Text
    choices: list[Text]
    fingerprint: Text
    dtype: Text
    positions: Text

    @model_validator(mode="before")
    @classmethod
    def _check_recall(cls, record: Any) -> Any:
        """Its policy would stand for one without recall."""
        if "recall" in record:
            raise ValueError("has its recall apart from its policy, as no record of this version")
        return record


CHECK = check_of(AnswerSchema)


def make_rnn(cell: Cell, model: PreTrainedModel, positions: str) -> MultiStateRNN:
    """The model that answers."""
    if cell.size is None:
        return MultiStateRNN(model, FULL, None, block=FULL_BLOCK)
    return MultiStateRNN(model, **cell.options, positions=positions)


Results = dict[Cell, list[float]]  # the score of each question


class ChatMemory(Task[Cell, str, float]):
    """One model on questions about conversations. An item is a question, by its prompt. Answers are greedy."""

    unit = "answers"
    shrinks = False  # answers are generated one by one

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        asked: Sequence[AskedQuestion],
        chat: bool,
        max_new_tokens: int,
        positions: str,
        metadata: Record,
    ) -> None:
        self.stop_tokens = sorted(stop_tokens_of(model, tokenizer))
        asking = {"positions": positions, "max_new_tokens": max_new_tokens}
        self.key = {**model_key(model), "stop_tokens": self.stop_tokens, **asking}
        self.metadata, self.tokenizer, self.positions, self.chat = metadata, tokenizer, positions, chat
        self.max_new_tokens = max_new_tokens
        self.asked = {one.key: one for one in asked}

    def cell_of(self, record: Record) -> Cell:
        return cell_of(record)

    def items(self, cell: Cell) -> list[str]:
        return list(self.asked)

    def read(self, records: list[Record]) -> dict[str, float]:
        return {
            record["item"]: score_answer(record["category"], record["answer"], record["expected"], record["choices"])
            for record in records
        }

    def work(self, job: Job[Cell, str]) -> int:
        heads = {self.asked[item].conversation: len(self.asked[item].head) for item in job.items}
        return sum(heads.values()) + sum(len(self.asked[item].tail) + self.max_new_tokens for item in job.items)

    def batches(self, job: Job[Cell, str]) -> list[list[str]]:
        """All questions of a conversation at once, so that it is read once."""
        conversations: dict[str, list[str]] = {}
        for item in job.items:
            conversations.setdefault(self.asked[item].conversation, []).append(item)
        return list(conversations.values())

    def prepare(self, job: Job[Cell, str], model: PreTrainedModel) -> Compute[str]:
        rnn = make_rnn(job.cell, model, self.positions)
        backend = {"backend": backend_names(rnn)}

        def compute(items: list[str], on_tokens: OnTokens) -> Iterator[Record]:
            began = perf_counter()
            state = read_conversation(rnn, self.asked[items[0]].head, on_tokens)
            reading = perf_counter() - began
            for item in items:
                began, one = perf_counter(), self.asked[item]
                tokens = answer_question(rnn, state, one.tail, self.max_new_tokens, self.stop_tokens)
                on_tokens(len(one.tail) + self.max_new_tokens)
                cost = {"seconds": perf_counter() - began, "reading_seconds": reading, "answer_tokens": len(tokens)}
                yield {**self._answer(item, one, tokens), **cost, **backend}

        return compute

    def _answer(self, item: str, asked: AskedQuestion, tokens: Sequence[int]) -> Record:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        if not self.chat:  # a base model continues with other questions
            text = text.partition("\n")[0]
        question = asked.question
        return {
            "item": item,
            "conversation": asked.conversation,
            "category": question.category,
            "question": question.question,
            "answer": text,
            "expected": question.expected,
            "choices": list(question.choices),
            "evidence": list(question.evidence),
            "tokens": len(asked.head) + len(asked.tail),
        }


def read_conversation(rnn: MultiStateRNN, ids: Sequence[int], on_tokens: OnTokens) -> MultiState:
    """The state after a conversation. With `recall_while_reading`, its blocks recall too."""

    def count(tokens: int) -> None:
        on_tokens(tokens)

    state, text = rnn.state(), torch.tensor([ids], device=rnn.device)
    rnn.read(text, state, last_only=True, on_block=count, recall_every=rnn.recall_while_reading)
    return state


def answer_question(
    rnn: MultiStateRNN, state: MultiState, ids: Sequence[int], max_new_tokens: int, stop_tokens: Sequence[int]
) -> list[int]:
    """The greedy answer from a copy of a state, without its stop token. A repetition penalty of the model is off."""
    out = rnn.generate(
        torch.tensor([ids], device=rnn.device),
        state=state.fork(1),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        temperature=None,
        top_p=None,
        top_k=None,
        eos_token_id=list(stop_tokens),
        pad_token_id=stop_tokens[0],
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits: tuple[Tensor, ...] = out.logits
    if not all(bool(one.isfinite().all()) for one in logits):
        raise UsageError("the model computed numbers that are not finite; compute it in another dtype")
    tokens: list[int] = out.sequences[0, len(ids) :].tolist()
    return tokens[:-1] if tokens and tokens[-1] in stop_tokens else tokens
