"""All cells on all questions, each answer a row of a store: what is there already is not asked again."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from transformers import PreTrainedModel

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.kin import families
from msrnn.evaluation.memory import batch_that_fits, release
from msrnn.evaluation.speaking import ends_of, roomy, say
from msrnn.evaluation.understanding.asking import Asker, Prompt
from msrnn.evaluation.understanding.questions import Question
from msrnn.evaluation.understanding.records import Records
from msrnn.evaluation.watch import Watch
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import FULL


class Run:
    """One model on one choice of questions. `beside` is written into every answer, and tells none apart."""

    def __init__(
        self,
        model: PreTrainedModel,
        asker: Asker,
        questions: list[Question],
        records: Records,
        batch: int,
        beside: dict[str, Any],
    ) -> None:
        self.model, self.asker, self.questions, self.records, self.batch = model, asker, questions, records, batch
        self.beside = beside
        self.ends = ends_of(model, asker.tokenizer)

    def results(self, cells: list[Cell], watch: Watch | None = None) -> Records:
        """An interruption costs the batch that was being answered, and no other."""
        watch = watch or Watch()
        todo = {who: self._batches(prompts) for who, prompts in self._missing(cells, watch).items()}
        most = self.records.exam.answer
        watch.total(sum(len(p.ids) + most for batches in todo.values() for batch in batches for p in batch))
        for who in todo:
            watch.cell(who)
            self._answer(who, todo[who], watch)
            release()
        return self.records

    def _missing(self, cells: list[Cell], watch: Watch) -> dict[Cell, dict[str, Prompt]]:
        """Who is still to be asked, and which prompts by their key; each once, however many cells show the answer."""
        whole = self.records.exam.length
        lengths = sorted({self.records.length(cell) for cell in cells})
        missing: dict[Cell, dict[str, Prompt]] = {}
        places = set[tuple[Cell, str]]()
        for question in self.questions:
            prompts = {n: self.asker.ask(question, n, "--length" if n == whole else "--size") for n in lengths}
            self.records.ask(question, prompts)
            by_key = {prompt.key: prompt for prompt in prompts.values()}
            for cell in cells:
                who, key = self.records.who(cell, self.records.asked[question.key])
                places.add((who, key))
                if not self.records.done(who, key):
                    missing.setdefault(who, {})[key] = by_key[key]
        self.records.sit()
        left = sum(len(prompts) for prompts in missing.values())
        watch.resumed(len(places) - left, len(places), "answers")
        return dict(sorted(missing.items(), key=lambda found: found[0].size is not None))

    def _batches(self, prompts: dict[str, Prompt]) -> list[list[Prompt]]:
        """Questions on one document together, since it is then read once; the longest first, which may not fit."""
        asked = list(prompts.values())
        together = [[asked[row] for row in family.rows] for family in families([prompt.ids for prompt in asked])]
        together.sort(key=lambda family: -max(len(prompt.ids) for prompt in family))
        batches: list[list[Prompt]] = []
        for family in together:
            for start in range(0, len(family), self.batch):
                some = family[start : start + self.batch]
                if batches and len(batches[-1]) + len(some) <= self.batch:
                    batches[-1] += some
                else:
                    batches.append(some)
        return batches

    def _answer(self, who: Cell, batches: list[list[Prompt]], watch: Watch) -> None:
        exam = self.records.exam
        rnn = self._rnn(who, max(len(prompt.ids) for batch in batches for prompt in batch))
        beside = {"backend": "/".join(sorted(set(rnn.spec.backends))), "length": exam.length, **self.beside}
        for batch in batches:
            began = perf_counter()
            with batch_that_fits(len(batch), who.label):
                said = say(rnn, [prompt.ids for prompt in batch], self.ends, exam.answer, on_tokens=watch.tokens)
            seconds = (perf_counter() - began) / len(batch)
            for prompt, ids in zip(batch, said, strict=True):
                text = self.asker.tokenizer.decode(ids, skip_special_tokens=True).strip()
                found = {"prediction": text, "tokens": len(prompt.ids), "said": len(ids), "seconds": seconds}
                self.records.add(who, prompt.key, {**found, **beside})

    def _rnn(self, who: Cell, longest: int) -> MultiStateRNN:
        """On a CPU, where nothing is captured, the unbounded model's state grows: it never attends to empty room."""
        if who.size is None and self.model.device.type == "cuda":
            return roomy(self.model, longest + self.records.exam.answer)
        return MultiStateRNN(self.model, who.policy, who.size, positions=self.records.key(who)["positions"])


def fingerprints(model: PreTrainedModel) -> dict[str, str]:
    """What tells a model's answers from another's."""
    told = MultiStateRNN(model, FULL, None).spec.fingerprint
    return {"fingerprint": told["model"], "dtype": told["dtype"]}
