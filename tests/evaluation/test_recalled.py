from __future__ import annotations

import pytest

from msrnn.errors import UsageError
from msrnn.evaluation.recalled import Recalled, split_name

NAMES = {
    " + 256 recalled": Recalled(256),
    " + 256 recalled every 4": Recalled(256, 4),
    " + 256 recalled, every 64 while reading": Recalled(256, while_reading=64),
    " + 256 recalled every 4, every 64 while reading": Recalled(256, 4, 64),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_is_recalled(name: str) -> None:
    assert str(NAMES[name]) == name
    for policy in ("echo", "window+4", "echo:upper", "decay=0.9,per=layer,first=0,recent=0.25"):
        assert split_name(f"{policy}{name}") == (policy, NAMES[name])
        assert split_name(policy) == (policy, None)


def test_spellings() -> None:
    assert split_name("window+4+256 Recalled every 1") == ("window+4", Recalled(256))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("echo + 0 recalled", "recall"),
        ("echo + 8 recalled every 0", "recall_every"),
        ("echo + 8 recalled, every 0 while reading", "recall_while_reading"),
    ],
)
def test_no_row_and_no_token(name: str, fault: str) -> None:
    with pytest.raises(UsageError) as refused:
        split_name(name)
    assert refused.value.name == fault
