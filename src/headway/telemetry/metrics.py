"""One table of every metric; the registry and docs/metrics.md are made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.types import Load

TTFT_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
TOKEN_S: Final = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
FINE_S: Final = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
RATIO: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    values: str = ""
    """The values that the labels take."""
    buckets: tuple[float, ...] = ()
    from_load: bool = False
    """Read from the backend's ``Load`` at scrape time."""


TABLE: Final = (
    Row(name="headway_requests_running", kind="gauge", help="Sequences in the running batch.", from_load=True),
    Row(name="headway_requests_waiting", kind="gauge", help="Requests queued in the engine.", from_load=True),
    Row(
        name="headway_kv_blocks",
        kind="gauge",
        help="KV cache blocks by state.",
        labels=("state",),
        values="held, cached, free",
        from_load=True,
    ),
    Row(
        name="headway_time_to_first_token_seconds",
        kind="histogram",
        help="Arrival to the first delivered non-empty content (not a role chunk, not a keep-alive).",
        buckets=TTFT_S,
    ),
    Row(
        name="headway_inter_token_latency_seconds",
        kind="histogram",
        help="Between two deliveries of content on a stream.",
        buckets=TOKEN_S,
    ),
    Row(
        name="headway_time_per_output_token_seconds",
        kind="histogram",
        help="Mean seconds per output token after the first, once per request.",
        buckets=TOKEN_S,
    ),
    Row(name="headway_request_seconds", kind="histogram", help="Arrival to the end of the answer.", buckets=REQUEST_S),
    Row(
        name="headway_stage_seconds",
        kind="histogram",
        help="Time on the critical path by stage.",
        labels=("stage",),
        values="the stages of docs/path.md",
        buckets=(*FINE_S, 10.0, 60.0),
    ),
    Row(
        name="headway_unattributed_seconds",
        kind="histogram",
        help="Time before the first content that no stage claims.",
        buckets=FINE_S,
    ),
    Row(name="headway_step_seconds", kind="histogram", help="One engine step.", buckets=FINE_S),
    Row(
        name="headway_step_prediction_error_ratio",
        kind="histogram",
        help="Absolute error of the predicted step time over the measured one.",
        buckets=RATIO,
    ),
    Row(
        name="headway_prefix_cache_tokens_total",
        kind="counter",
        help="Prompt tokens by whether the prefix cache held them.",
        labels=("result",),
        values="hit, miss",
        from_load=True,
    ),
    Row(
        name="headway_spec_tokens_total",
        kind="counter",
        help="Draft tokens of speculation.",
        labels=("outcome",),
        values="proposed, accepted",
    ),
    Row(name="headway_preemptions_total", kind="counter", help="Sequences preempted by recompute.", from_load=True),
    Row(
        name="headway_cancelled_total",
        kind="counter",
        help="Requests ended before their answer was complete.",
        labels=("phase", "cause"),
        values="queued, prefill, decode; disconnect, deadline, slow_reader, error",
    ),
    Row(
        name="headway_cancel_to_free_seconds",
        kind="histogram",
        help="From a cancellation to its KV blocks being free.",
        buckets=FINE_S,
    ),
    Row(
        name="headway_refused_total",
        kind="counter",
        help="Requests refused, by the error's code.",
        labels=("reason",),
        values="the codes of the error tree",
    ),
    Row(
        name="headway_tokens_total",
        kind="counter",
        help="Tokens counted, streamed or not, asked for or not.",
        labels=("kind",),
        values="prompt, output",
    ),
)
_ROWS: Final = {row.name: row for row in TABLE}


class _LoadCollector(Collector):
    """Reads the backend's load when a scraper asks."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry need not read the load to register this."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the rows that are marked ``from_load``."""
        load = self._load()
        values: dict[str, dict[tuple[str, ...], float]] = {
            "headway_requests_running": {(): load.running},
            "headway_requests_waiting": {(): load.waiting},
            "headway_kv_blocks": {
                ("held",): load.blocks_held,
                ("cached",): load.blocks_cached,
                ("free",): load.blocks_free,
            },
            "headway_prefix_cache_tokens_total": {
                ("hit",): load.prefix_hit_tokens,
                ("miss",): load.prefix_miss_tokens,
            },
            "headway_preemptions_total": {(): load.preemptions},
        }
        for row in TABLE:
            if not row.from_load:
                continue
            family = (GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily)(
                row.name, row.help, labels=row.labels
            )
            for labels, value in values[row.name].items():
                family.add_metric(labels, value)
            yield family


class Metrics:
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft = self._histogram("headway_time_to_first_token_seconds")
        self.inter_token = self._histogram("headway_inter_token_latency_seconds")
        self.per_output_token = self._histogram("headway_time_per_output_token_seconds")
        self.request = self._histogram("headway_request_seconds")
        self.unattributed = self._histogram("headway_unattributed_seconds")
        self.step = self._histogram("headway_step_seconds")
        self.step_error = self._histogram("headway_step_prediction_error_ratio")
        self.cancel_to_free = self._histogram("headway_cancel_to_free_seconds")
        self._stage = self._histogram("headway_stage_seconds")
        self._spec = self._counter("headway_spec_tokens_total")
        self._cancelled = self._counter("headway_cancelled_total")
        self._refused = self._counter("headway_refused_total")
        self._tokens = self._counter("headway_tokens_total")

    def _histogram(self, name: str) -> Histogram:
        row = _ROWS[name]
        return Histogram(name, row.help, row.labels, buckets=row.buckets, registry=self.registry)

    def _counter(self, name: str) -> Counter:
        row = _ROWS[name]
        return Counter(name, row.help, row.labels, registry=self.registry)

    def follow(self, load: Callable[[], Load]) -> None:
        """Feed the gauges and counters of ``Load`` from a backend, at scrape time; call it once."""
        self.registry.register(_LoadCollector(load))

    def stage(self, stage: str, seconds: float) -> None:
        """Count one passage of a stage."""
        self._stage.labels(stage).observe(seconds)

    def cancelled(self, phase: str, cause: str) -> None:
        """Count a request that was ended from outside."""
        self._cancelled.labels(phase, cause).inc()

    def refused(self, reason: str) -> None:
        """Count a refusal by its error code."""
        self._refused.labels(reason).inc()

    def tokens(self, *, prompt: int, output: int) -> None:
        """Count a request's tokens."""
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("output").inc(output)

    def speculated(self, *, proposed: int, accepted: int) -> None:
        """Count draft tokens."""
        self._spec.labels("proposed").inc(proposed)
        self._spec.labels("accepted").inc(accepted)

    def render(self) -> bytes:
        """Return the text exposition (``CONTENT_TYPE``)."""
        return generate_latest(self.registry)


def render_docs() -> str:
    """Return docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Served at `/metrics` in Prometheus' text format. Made from the table in `src/headway/telemetry/metrics.py`.",
        "",
        "| name | kind | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for row in TABLE:
        labels = f"{', '.join(f'`{label}`' for label in row.labels)}: {row.values}" if row.labels else ""
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.help} |")
    return "\n".join(lines) + "\n"
