"""New positions and rotations of the compiled loops against `msrnn.core.rope`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from msrnn.backends.numba.rope import new_gap, rotation, spacing_code
from msrnn.core.rope import SPACINGS, Rope, spacing
from tests.helpers.ropes import FAR, FREQUENCY, decoded
from tests.helpers.ropes import impatient as impatient


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_threads_share_a_function_in_compiled_loops() -> None:
    def third(gap: int) -> float:
        return gap / 3

    expected = {at: decoded(third, at, "torch") for at in range(20, 400, 20)}
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda at: decoded(third, at, "numba"), expected))
    for mine, theirs in zip(found, expected.values(), strict=True):
        assert torch.equal(mine.position, theirs.position)


@pytest.mark.parametrize("error", [ValueError("seven"), KeyboardInterrupt()])
def test_what_a_function_raises_passes_through_compiled_loops(error: BaseException) -> None:
    def bad(gap: int) -> float:
        if gap == 10**6 - 1:
            raise error
        return gap / 3

    with pytest.raises(type(error)) as raised:
        decoded(bad, 10**6, "numba")
    assert raised.value is error
    decoded(bad, 500, "numba")


@pytest.mark.parametrize("name", [*SPACINGS, "compressed:7", "its own"])
def test_the_compiled_function_is_the_named_one(name: str) -> None:
    chosen = spacing((lambda gap: gap / 3) if name == "its own" else name)
    assert chosen is not None
    code = spacing_code(chosen)
    for gap in (1, 2, 7, 8, 10, 11, 12, 99, FAR // 10):
        assert new_gap(gap, code.kind, code.limit, code.own.pointer) == pytest.approx(
            float(chosen.function(torch.tensor([float(gap)], dtype=torch.float64))), rel=1e-14
        )


@pytest.mark.parametrize("new_position", [0.0, 0.87, 511.5, 8_000.25])
@pytest.mark.parametrize("position", [0, 7, 70_001, FAR])
def test_compiled_cosines_are_exact_to_rounding(position: int, new_position: float) -> None:
    cos, sin = torch.empty(16), torch.empty(16)
    rotation(
        FREQUENCY.numpy(), torch.tensor(position, dtype=torch.int32).numpy()[()], new_position, cos.numpy(), sin.numpy()
    )
    angle = Rope(FREQUENCY).angle(torch.tensor(position), torch.tensor(new_position).double())
    torch.testing.assert_close(cos.double(), angle.cos(), atol=2e-7, rtol=0)
    torch.testing.assert_close(sin.double(), angle.sin(), atol=2e-7, rtol=0)
