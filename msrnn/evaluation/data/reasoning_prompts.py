"""Prompts for problems: solve one step by step, or several one after the other in one long answer.

The wording for one problem is the one that Qwen's and DeepSeek's model cards name, in the user's message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from msrnn.evaluation.data.problems import Problem
from msrnn.evaluation.data.prompts import Prompt, fill_template, prompt_ids
from msrnn.hf import chat_template

ONE = """{problem}

Please reason step by step, and put your final answer within \\boxed{}."""
SEVERAL = """Solve the following {count} problems one after the other.

{problems}

Please reason step by step. End the solution of each problem with a line "Answer N: \\boxed{}", where N is the number \
of the problem and its final answer is within \\boxed{}."""
LEAD, NEXT = "Problem:\n", "\n\nSolution:\n"  # around a prompt without a chat template


class AskedProblems(NamedTuple):
    """A prompt, and the problems that it asks to solve."""

    problems: tuple[Problem, ...]
    ids: tuple[int, ...]

    @property
    def dataset(self) -> str:
        return self.problems[0].dataset

    @property
    def key(self) -> str:
        """A digest of the prompt and of what is expected."""
        content = [Prompt([*self.ids], 0).key, self.dataset, [problem.expected for problem in self.problems]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def ask_problems(tokenizer: Any, problems: Sequence[Problem], together: int, chat: bool) -> list[AskedProblems]:
    """Prompts with `together` problems of one dataset each; the last one of a dataset may have fewer."""
    if chat:
        chat_template.check_template(tokenizer)
    datasets = dict.fromkeys(problem.dataset for problem in problems)
    asked = []
    for name in datasets:
        own = [problem for problem in problems if problem.dataset == name]
        for start in range(0, len(own), together):
            some = tuple(own[start : start + together])
            request = write_request(some)
            ids = prompt_ids(tokenizer, request if chat else LEAD + request + NEXT, chat)
            asked.append(AskedProblems(some, tuple(ids)))
    return asked


def write_request(problems: Sequence[Problem]) -> str:
    if len(problems) == 1:
        return fill_template(ONE, problem=problems[0].text)
    texts = (f"Problem {number}:\n{problem.text}" for number, problem in enumerate(problems, start=1))
    return fill_template(SEVERAL, count=str(len(problems)), problems="\n\n".join(texts))


def find_end(problems: int) -> str:
    """Where the answer of a model without a chat template ends: it continues with another problem."""
    return f"\n{LEAD.strip()}" if problems == 1 else f"\nProblem {problems + 1}"
