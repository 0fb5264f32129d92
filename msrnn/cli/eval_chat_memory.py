from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from msrnn.cli.evaluation import evaluate_model, load_model
from msrnn.cli.evaluation_options import Chat, EvaluationOptions
from msrnn.cli.options import MaxNewTokens
from msrnn.cli.recall_options import RecallOptions, RecallRows
from msrnn.cli.results_folder import report
from msrnn.evaluation.data.conversations import check_source, load_conversations
from msrnn.policy import FULL

AUTO = "auto"
POLICIES, SIZES = ("tova", FULL.name), (512,)

Source = Annotated[Path, Argument(metavar="FILE", help="Conversations and questions, a .json file of LoCoMo.")]
Policies = Annotated[
    list[str] | None,
    Option("--policy", help="A version of the model: a policy, or full; repeat.", show_default=", ".join(POLICIES)),
]
Sizes = Annotated[list[int] | None, Option("--size", help="KV rows per layer; repeat for more.", show_default="512")]
Limit = Annotated[int | None, Option(help="Most questions to ask, conversation by conversation.", show_default="all")]
Positions = Annotated[
    str,
    Option(
        help="Positions of kept tokens: original, compressed, compact; auto: compressed beyond the training length."
    ),
]
Out = Annotated[Path, Option(help="Write chat-memory.jsonl, .md and .csv here.")]


@dataclass(frozen=True)
class ChatRecallOptions(RecallOptions):
    """Each bounded policy answers with recall as well, if nothing is said."""

    recall: RecallRows = 256


def chat_memory(
    *,
    file: Source,
    policy: Policies = None,
    size: Sizes = None,
    limit: Limit = None,
    chat: Chat = None,
    positions: Positions = AUTO,
    max_new_tokens: MaxNewTokens = 50,
    out: Out = Path("results/chat-memory"),
    recalling: ChatRecallOptions,
    options: EvaluationOptions,
) -> None:
    """Questions about a chat that lasts months (LoCoMo): F1 by category, with and without recall.

    Each version of the model reads a conversation once into a state, and each question is asked from a copy of it. The
    versions are the full model, each policy at each size, and the same with recall of evicted rows, as "tova 512 + 256
    recalled"; with --recall 0, only those without. The categories are
    multi-hop, temporal, open-domain, single-hop and adversarial. Answers are greedy and scored as LoCoMo's authors do:
    F1 of stemmed words; an adversarial answer must say that the conversation does not mention it. Intervals are 95 %,
    by bootstrap over the questions. Answers that the folder has of the same model, prompt and version are not generated
    again, so an interrupted run resumes.

    Examples:
        msrnn eval chat-memory locomo10.json --limit 20
        msrnn eval chat-memory locomo10.json --size 512 --size 2048 --recall 256 --recall-while-reading 64
        msrnn eval chat-memory locomo10.json --policy echo --recall 0
    """
    check_source(file)
    from msrnn import evaluation
    from msrnn.evaluation.api.chat_memory import chat_memory_cells, check_questions
    from msrnn.evaluation.tasks.chat_memory import CHECK, NAME
    from msrnn.evaluation.tasks.chat_memory_scores import check_stemmer

    given, sizes = policy or POLICIES, size or SIZES
    policies = list(dict.fromkeys([*given, *recalling.add_to(given)]))  # without recall, and with it
    chat_memory_cells(policies, sizes)
    check_questions(limit, max_new_tokens, positions)
    check_stemmer()
    options.check()
    conversations = load_conversations(file)
    loaded = load_model(options, out, NAME, CHECK, file=file.name)
    run = partial(
        evaluation.chat_memory,
        conversations=conversations,
        policies=policies,
        sizes=sizes,
        limit=limit,
        chat=chat,
        positions=positions,
        max_new_tokens=max_new_tokens,
    )
    report(evaluate_model(options, loaded, run), out)
