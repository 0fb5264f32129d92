from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.saved_states import Saved


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def of(kind: str) -> Saved:
        if kind not in made:
            made[kind] = Saved(kind, tmp_path_factory.mktemp("states"))
        return made[kind]

    return of
