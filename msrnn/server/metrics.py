"""Metrics for Prometheus, named after vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from msrnn.engine.engine import Engine
from msrnn.engine.lanes import LongEngine
from msrnn.engine.requests import Event, Request

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counts and times requests and tokens. Gauges read the engine when metrics are read."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        kinds: dict[str, Any] = {"namespace": "msrnn", "registry": self.registry}
        self.running = Gauge("num_requests_running", "Answers that are generated now", **kinds)
        self.running.set_function(lambda: engine.counts.running)
        waiting = Gauge("num_requests_waiting", "Requests that wait, or whose prompt is being read", **kinds)
        waiting.set_function(lambda: engine.counts.waiting + engine.counts.prefill)
        Gauge("num_batch_slots", "Batch slots of the decode batch", **kinds).set(engine.capacity)
        self.registry.register(_Counts(engine))
        sessions = Gauge("num_sessions", "Sessions that can be continued", **kinds)
        sessions.set_function(lambda: len(engine.sessions))
        held = Gauge("session_bytes", "Bytes of all sessions", **kinds)
        held.set_function(lambda: engine.sessions.nbytes)
        archived = Gauge("archived_tokens", "Tokens in the archives of prompts and answers in the batch", **kinds)
        archived.set_function(lambda: sum(lane.archived_tokens for lane in engine.lanes))
        archives = Gauge("archive_bytes", "Bytes of these archives, and of those of cached prefixes", **kinds)
        archives.set_function(lambda: sum(lane.archive_nbytes for lane in engine.lanes))
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **kinds)
        self.read_tokens = Counter("prompt_tokens_read", "Tokens of prompts that had to be read", **kinds)
        self.generated_tokens = Counter("generation_tokens", "Tokens of answers", **kinds)
        self.finished = Counter("request_success", "Answers, by how they ended", ["finished_reason"], **kinds)
        self.queue = Histogram("request_queue_time_seconds", "Until a prompt is read", buckets=_SECONDS, **kinds)
        self.first = Histogram("time_to_first_token_seconds", "Until the first token", buckets=_SECONDS, **kinds)
        self.between = Histogram("inter_token_latency_seconds", "Between tokens", buckets=_SECONDS, **kinds)
        self.whole = Histogram("e2e_request_latency_seconds", "Until the last token", buckets=_SECONDS, **kinds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Counts(Collector):
    """Counters of the engine, its prefix cache and its sessions."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._sessions = engine, engine.sessions

    def collect(self) -> Iterator[CounterMetricFamily]:
        caches = [lane.queue.prefixes for lane in self._engine.lanes]
        files = [cache.files for cache in caches if cache.files is not None]
        counts = {
            "hits": ("Prompts that began with a cached prefix", sum(cache.hits for cache in caches)),
            "misses": ("Prompts that did not", sum(cache.misses for cache in caches)),
            "disk_hits": ("Prompts whose cached prefix was in a file", sum(folder.hits for folder in files)),
            "disk_errors": ("Cached prefixes that could not be written", sum(folder.errors for folder in files)),
        }
        for name, (text, count) in counts.items():
            yield CounterMetricFamily(f"msrnn_prefix_cache_{name}", text, count)
        dropped = sum(lane.dropped_tokens for lane in self._engine.lanes)
        yield CounterMetricFamily("msrnn_archive_dropped_tokens", "Tokens that full archives have dropped", dropped)
        evicted = CounterMetricFamily("msrnn_sessions_evicted", "Sessions deleted by a limit", labels=["limit"])
        for limit, count in self._sessions.evicted.items():
            evicted.add_metric([limit], count)
        yield evicted
        if isinstance(self._engine, LongEngine):
            text = "Requests that might pass the training length, and so had other positions"
            yield CounterMetricFamily("msrnn_long_requests", text, self._engine.long_requests)


class Timer:
    """Times one request, event by event."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics, self._began = metrics, monotonic()
        self._last: dict[int, float] = {}
        metrics.prompt_tokens.inc(len(request.prompt))

    def event(self, event: Event) -> None:
        metrics, now = self._metrics, monotonic()
        if not self._last:
            kept = event.request.cached_tokens if event.request.session is None else 0
            metrics.read_tokens.inc(max(0, len(event.request.prompt) - kept))
            if event.request.begun is not None:  # or it was cancelled while it waited
                metrics.queue.observe(max(0.0, event.request.begun - self._began))
        if event.token is not None:
            metrics.generated_tokens.inc()
            if event.number in self._last:
                metrics.between.observe(now - self._last[event.number])
            else:
                metrics.first.observe(now - self._began)
        self._last[event.number] = now
        if event.finish_reason is not None:
            metrics.finished.labels(event.finish_reason).inc()
            metrics.whole.observe(now - self._began)


class _MergedMetrics(Collector):
    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for found in text_string_to_metric_families(text):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                family.samples += [
                    sample._replace(labels={"replica": str(replica), **sample.labels}) for sample in found.samples
                ]
        yield from families.values()


def merge_metrics(texts: Mapping[int, str]) -> bytes:
    """Merge the metrics of several replicas into one text; the replica is a label."""
    registry = CollectorRegistry()
    registry.register(_MergedMetrics(texts))
    return generate_latest(registry)
