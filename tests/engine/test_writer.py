from __future__ import annotations

import threading

import pytest

from msrnn.engine.writer import Writer, make_done_future


def test_files_are_written_in_order_and_by_another_thread() -> None:
    writer, allowed = Writer(), threading.Event()
    done: list[int] = []
    threads: set[str] = set()

    def write(number: int) -> None:
        assert allowed.wait(60)
        done.append(number)
        threads.add(threading.current_thread().name.partition("_")[0])

    futures = [writer.submit(lambda number=number: write(number)) for number in range(5)]  # type: ignore[misc]
    assert done == []
    allowed.set()
    writer.close()
    assert (done, [future.done() for future in futures]) == ([*range(5)], [True] * 5)
    assert threads == {"msrnn writer"}


def test_a_closed_writer_writes_again() -> None:
    writer, done = Writer(), list[int]()
    writer.close()
    for number in range(2):
        writer.submit(lambda number=number: done.append(number)).result(60)  # type: ignore[misc]
        writer.close()
    assert done == [0, 1]


def test_a_failed_write_is_an_error_of_its_future_alone() -> None:
    writer = Writer()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    failed, written = writer.submit(fail), writer.submit(lambda: None)
    writer.close()
    assert isinstance(failed.exception(), OSError)
    assert written.exception() is None


def test_futures_that_are_done_already() -> None:
    assert make_done_future().done()
    with pytest.raises(OSError, match="full"):
        make_done_future(OSError("full")).result()
