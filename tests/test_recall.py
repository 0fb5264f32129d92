"""The options of recall, and of prompts that recall: where reads may end, and which prefixes prompts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.recall import QUESTION, PromptRecall, Recall, Recalling, count_dropped


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rows": 0}, "recall"),
        ({"rows": 1.5}, "recall"),
        ({"rows": True}, "recall"),
        ({"rows": 8, "every": 0}, "recall_every"),
        ({"rows": 8, "archive": ""}, "archive"),
        ({"rows": 8, "archive": 3}, "archive"),
        ({"rows": 8, "search": "fast"}, "search"),
        ({"rows": 8, "limit": 0}, "archive_bytes"),
    ],
)
def test_refusals(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Recall(**options)


def test_an_archive_is_in_memory_or_in_a_folder(tmp_path: Path) -> None:
    assert Recall(8).folder is None
    assert Recall(8, archive="device").folder is None
    assert Recall(8, archive=str(tmp_path)).folder == tmp_path
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="is a file"):
        Recall(8, archive=str(file))


def test_states_of_the_same_name_fit() -> None:
    assert Recall(8).name == Recall(8, every=4, archive="device").name
    assert len({Recall(8).name, Recall(16).name, Recall(8, state_dtype="int8").name}) == 3


@pytest.mark.parametrize("every", [1, 3, 8, 64])
@pytest.mark.parametrize("first", [0, 5, 64])
def test_reads_do_not_divide_blocks(every: int, first: int) -> None:
    """However many tokens are read at once, reads end where blocks do; they are no longer than they need to be."""
    recalling, last = Recalling(every, starts=True), first + 50
    for most in (1, 7, 64, 100):
        begin = first
        while begin < last:
            end = recalling.end_of_block(begin, begin + most, last)
            assert begin < end <= last
            assert end == last or end % every == 0
            assert end - begin <= max(most, every)
            begin = end


@pytest.mark.parametrize("while_reading", [None, 10])
@pytest.mark.parametrize("tokens", [1, 64, 65, 500])
def test_the_last_tokens_of_a_prompt_recall_as_an_answer_does(tokens: int, while_reading: int | None) -> None:
    parts = PromptRecall(Recall(8, 3), while_reading).parts(tokens)
    assert parts[-1] == (tokens, Recalling(3, starts=True))
    if tokens <= QUESTION:
        assert len(parts) == 1
    else:
        reading = None if while_reading is None else Recalling(while_reading, starts=True)
        assert parts[:-1] == [(tokens - QUESTION, reading)]


def test_prompts_share_whole_blocks_before_their_questions() -> None:
    recall = PromptRecall(Recall(8), 48)
    assert [recall.find_shared_length(length, 500) for length in (0, 47, 48, 430, 440, 500)] == [
        0,
        0,
        48,
        384,
        432,
        432,
    ]
    assert recall.find_shared_length(60, 60) == 0
    assert PromptRecall(Recall(8), None).find_shared_length(500, 500) == 384


def test_an_answer_recalls_at_multiples_only() -> None:
    assert PromptRecall(Recall(8, 5), None).answer == Recalling(5, starts=False)


def test_a_folder_is_not_shown() -> None:
    assert PromptRecall(Recall(8, archive="/some/folder"), 64).shown == {
        "rows": 8,
        "every": 1,
        "while_reading": 64,
        "archive": "folder",
        "archive_bytes": None,
        "search": "auto",
    }


def test_an_archive_drops_whole_segments() -> None:
    assert [count_dropped(tokens, 2500) for tokens in (0, 2500, 2501, 3524, 3525)] == [0, 0, 1024, 1024, 2048]
    assert count_dropped(10**9, None) == 0
