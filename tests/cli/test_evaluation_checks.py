from __future__ import annotations

from types import SimpleNamespace

import pytest

from msrnn.cli.evaluation_checks import check_against, check_batch, check_counts, check_length, check_positions
from msrnn.errors import UsageError
from msrnn.evaluation.cells import FULL


def test_numbers_that_are_too_small_or_too_large() -> None:
    check_length(2)
    check_counts(books=None, chunks_per_book=1, batch=2**16)
    with pytest.raises(UsageError, match=r"^--length 1: must be 2 or more"):
        check_length(1)
    with pytest.raises(UsageError, match=r"^chunks_per_book=0: must be a whole number, 1 or more"):
        check_counts(books=1, chunks_per_book=0)
    for check in (check_counts, check_batch):
        with pytest.raises(UsageError, match=r"^batch=65537: must be a whole number, from 1 to 65,536"):
            check(batch=2**16 + 1)


def test_the_one_compared_with_may_have_any_of_its_names() -> None:
    assert [check_against(name, ["tova", FULL]) for name in ("tova+0", FULL)] == ["tova", FULL]
    with pytest.raises(UsageError, match=r"^--against h2o: .*; add --policy h2o$"):
        check_against("h2o", ["tova", FULL])


def test_chunks_longer_than_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    check_positions(SimpleNamespace(max_position_embeddings=64), 64)
    check_positions(SimpleNamespace(), 65)
    assert capsys.readouterr().err == ""
    check_positions(SimpleNamespace(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4}), 65)
    assert "more than the 64" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--length 65: this model has 64 positions"):
        check_positions(SimpleNamespace(max_position_embeddings=64), 65)
