"""The plan of a read needs no device: which columns a forward pass has, in which blocks, and by which graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from msrnn.hf.read_plan import SHORTEST_REST, ReadStep, Shape, plan_read
from msrnn.hf.wavefront import Wave

WAVE = Wave(block=32, blocks=8, alone=128, shortest=32)


def none(_: Shape) -> bool:
    return False


def every(_: Shape) -> bool:
    return True


@pytest.mark.parametrize("stepwise", [False, True])
def test_whole_blocks_are_one_graph(stepwise: bool) -> None:
    assert plan_read(256, WAVE, stepwise, every) == [ReadStep(256, Shape(256, 32), replays=True)]
    assert plan_read(32, WAVE, stepwise, every) == [ReadStep(32, Shape(32, 32), replays=True)]


def test_few_blocks_are_read_in_shorter_ones() -> None:
    wave = WAVE._replace(shortest=8)
    shapes = [plan_read(width, wave, False, every)[0].shape for width in (32, 64, 128, 256)]
    assert shapes == [Shape(32, 32), Shape(64, 8), Shape(128, 16), Shape(256, 32)]
    assert plan_read(64, wave, True, every)[0].shape == Shape(64, 32)  # token by token, a shorter block gains nothing


def test_without_a_graph_blocks_are_as_large_as_may_be_read_alone() -> None:
    assert plan_read(256, WAVE, False, none) == [ReadStep(256, Shape(256, 128), replays=False)]
    assert plan_read(64, WAVE, False, none) == [ReadStep(64, Shape(64, 64), replays=False)]
    assert plan_read(96, WAVE, False, none) == [ReadStep(96, Shape(96, 32), replays=False)]


def test_blocks_that_are_read_token_by_token_are_read_alone_until_there_is_a_graph_of_all() -> None:
    block = ReadStep(32, Shape(32, 32), replays=True)
    assert plan_read(128, WAVE, True, lambda shape: shape == Shape(32, 32)) == [block] * 4
    assert plan_read(128, WAVE, True, none) == [block._replace(replays=False)] * 4


def test_a_graph_that_is_captured_between_two_blocks_serves_those_after_it() -> None:
    asked: list[Shape] = []

    def third(shape: Shape) -> bool:
        asked.append(shape)
        return asked.count(Shape(32, 32)) > 2

    assert [step.replays for step in plan_read(128, WAVE, True, third)] == [False, False, True, True]
    assert asked == [Shape(128, 32), *[Shape(32, 32)] * 4]


@pytest.mark.parametrize("has_graph", [none, every])
def test_the_rest_of_a_text_is_padded_to_few_shapes(has_graph: Callable[[Shape], bool]) -> None:
    plans = {width: plan_read(width, WAVE, False, has_graph) for width in range(1, 128) if width % 32}
    steps = [step for (step,) in plans.values()]
    assert [step.width for step in steps] == list(plans)
    assert {step.shape.width for step in steps} == {SHORTEST_REST, 32, 64, 128}
    assert all(step.shape.block == step.shape.width and 0 <= step.padding < step.shape.width for step in steps)
    assert all(step.padding < step.width or step.shape.width == SHORTEST_REST for step in steps)
    assert {step.replays for step in steps} == {has_graph is every}


def test_tokens_that_are_read_one_by_one_get_no_padding() -> None:
    """It would cost as much as they do."""
    assert plan_read(45, WAVE, True, every) == [ReadStep(45, Shape(45, 45), replays=False)]


def test_no_graph_of_a_single_column_is_asked_for() -> None:
    """A read of one column is rare; a decode step has its own graph."""

    def refuse(shape: Shape) -> bool:
        raise AssertionError(shape)

    assert plan_read(1, Wave(1, 1, 1, 1), False, refuse) == [ReadStep(1, Shape(1, 1), replays=False)]


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("has_graph", [none, every, lambda shape: shape.width > 64, lambda shape: shape.width <= 64])
@pytest.mark.parametrize(
    "wave",
    [WAVE, WAVE._replace(shortest=4), Wave(64, 1, 64, 64), Wave(16, 4, 50, 8), Wave(1, 1, 1, 1), Wave(5, 2, 7, 2)],
)
def test_every_column_is_read_once(wave: Wave, has_graph: Callable[[Shape], bool], stepwise: bool) -> None:
    for columns in (*range(1, 140), 1000):
        for width in wave.widths(columns):
            steps = plan_read(width, wave, stepwise, has_graph)
            assert sum(step.width for step in steps) == width
            assert all(step.padding >= 0 for step in steps)
            assert all(step.shape.width % step.shape.block == 0 for step in steps)
            assert len(steps) == 1 or not any(step.padding for step in steps)
