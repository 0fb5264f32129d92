from __future__ import annotations

import re
from dataclasses import replace

import pytest

from msrnn.engine.engine import Engine
from msrnn.engine.lanes import LongEngine
from msrnn.engine.requests import Event, SamplingParams
from msrnn.recall import PromptRecall, Recall
from msrnn.server.metrics import Metrics, Timer, merge_metrics
from tests.helpers.fake_executor import BYTES, FakeExecutor


def value(metrics: Metrics, name: str, labels: str = "") -> float:
    found = re.search(rf"^msrnn_{name}{re.escape(labels)} (\S+)$", metrics.text().decode(), re.MULTILINE)
    assert found is not None, metrics.text().decode()
    return float(found[1])


@pytest.fixture
def engine() -> Engine:
    return Engine(FakeExecutor(slots=2))


def test_gauges_read_the_engine(engine: Engine) -> None:
    metrics = Metrics(engine)
    assert [value(metrics, f"num_requests_{state}") for state in ("running", "waiting")] == [0, 0]
    for number in range(3):
        engine.add(engine.request([5, number + 3], SamplingParams(max_tokens=9), "talk" if number == 0 else None))
    while engine.counts.running < 2:
        engine.step()
    assert [value(metrics, f"num_requests_{state}") for state in ("running", "waiting")] == [2, 1]
    while not engine.idle:
        engine.step()
    assert (value(metrics, "num_batch_slots"), value(metrics, "num_sessions")) == (2, 1)
    assert value(metrics, "session_bytes") == BYTES
    assert (value(metrics, "archived_tokens"), value(metrics, "archive_bytes")) == (0, 0)
    assert value(metrics, "prefix_cache_misses_total") + value(metrics, "prefix_cache_hits_total") == 2


def test_tokens_and_times_of_a_request(engine: Engine) -> None:
    metrics = Metrics(engine)
    request = engine.request([5, 6, 7], SamplingParams(max_tokens=4, n=2))
    timer = Timer(metrics, request)
    engine.add(request)
    while not engine.idle:
        for event in engine.step():
            timer.event(event)
    assert [value(metrics, f"{name}_total") for name in ("prompt_tokens", "prompt_tokens_read")] == [3, 3]
    assert value(metrics, "generation_tokens_total") == 8
    assert value(metrics, "request_success_total", '{finished_reason="length"}') == 2
    counts = ("request_queue_time_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")
    assert [value(metrics, f"{name}_count") for name in counts] == [1, 2, 6]
    assert value(metrics, "e2e_request_latency_seconds_count") == 2


def test_a_request_that_is_cancelled_while_it_waits(engine: Engine) -> None:
    metrics = Metrics(engine)
    request = engine.request([5, 6, 7])
    timer = Timer(metrics, request)
    timer.event(Event(request, 0, None, "", None, "cancelled"))
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "request_success_total", '{finished_reason="cancelled"}') == 1


def test_tokens_of_the_prefix_cache_are_not_read(engine: Engine) -> None:
    metrics = Metrics(engine)
    request = engine.request([5, 6, 7])
    request.cached_tokens = 2
    Timer(metrics, request).event(Event(request, 0, 9, "", None, None))
    assert (value(metrics, "prompt_tokens_total"), value(metrics, "prompt_tokens_read_total")) == (3, 1)


def test_requests_past_the_training_length_are_counted(engine: Engine) -> None:
    assert b"msrnn_long_requests" not in Metrics(engine).text()
    longer = LongEngine(FakeExecutor(), FakeExecutor(positions="compressed"), 8)
    longer.generate([[5] * 7, [6]], SamplingParams(max_tokens=2), progress=False)
    assert value(Metrics(longer), "long_requests_total") == 1


def test_metrics_of_replicas_have_their_number(engine: Engine) -> None:
    texts = {}
    for number in (0, 2):
        metrics = Metrics(engine)
        metrics.generated_tokens.inc(number + 1)
        metrics.finished.labels("stop").inc()
        texts[number] = metrics.text().decode()
    lines = merge_metrics(texts).decode().splitlines()
    assert [line for line in lines if line.startswith("msrnn_generation_tokens_total{")] == [
        'msrnn_generation_tokens_total{replica="0"} 1.0',
        'msrnn_generation_tokens_total{replica="2"} 3.0',
    ]
    assert 'msrnn_request_success_total{finished_reason="stop",replica="2"} 1.0' in lines
    assert sum(line.startswith("# TYPE msrnn_generation_tokens_total ") for line in lines) == 1


def test_archives_are_measured() -> None:
    executor = FakeExecutor(slots=2)
    recall = PromptRecall(Recall(4), None)
    executor.facts = replace(executor.facts, recall=recall, archived_row_nbytes=10)
    engine = Engine(executor)
    metrics = Metrics(engine)
    request = engine.request([5, 6, 7], SamplingParams(max_tokens=4))
    engine.add(request)
    while len(request.answers[0].tokens) < 3:
        engine.step()
    assert (value(metrics, "archived_tokens"), value(metrics, "archive_bytes")) == (5, 50)
    assert value(metrics, "archive_dropped_tokens_total") == 0


def test_tokens_that_archives_drop_are_counted() -> None:
    executor = FakeExecutor(slots=2)
    executor.facts = replace(executor.facts, recall=PromptRecall(Recall(4), None), archived_tokens=2048)
    engine = Engine(executor)
    metrics = Metrics(engine)
    request = engine.request([5] * 2050, SamplingParams(max_tokens=2))
    engine.add(request)
    while not request.finished:
        engine.step()
    assert value(metrics, "archive_dropped_tokens_total") == 1024
