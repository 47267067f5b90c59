"""One table of metrics, and what feeds them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headway.telemetry.metrics import TABLE, Metrics, render_docs
from headway.types import Load

CONTRACT = [
    "headway_requests_running",
    "headway_requests_waiting",
    "headway_kv_blocks",
    "headway_time_to_first_token_seconds",
    "headway_inter_token_latency_seconds",
    "headway_time_per_output_token_seconds",
    "headway_request_seconds",
    "headway_stage_seconds",
    "headway_unattributed_seconds",
    "headway_step_seconds",
    "headway_step_prediction_error_ratio",
    "headway_prefix_cache_tokens_total",
    "headway_spec_tokens_total",
    "headway_preemptions_total",
    "headway_cancelled_total",
    "headway_cancel_to_free_seconds",
    "headway_refused_total",
    "headway_tokens_total",
]


def test_the_table_holds_the_contracts_metrics() -> None:
    assert [row.name for row in TABLE] == CONTRACT


def test_every_row_is_exposed_once() -> None:
    metrics = Metrics()
    metrics.follow(Load)
    families = [family.name for family in text_string_to_metric_families(metrics.render().decode())]
    families = [name for name in families if not name.endswith("_created")]
    assert sorted(families) == sorted(name.removesuffix("_total") for name in CONTRACT)


def test_load_is_read_at_scrape_time() -> None:
    loads = [Load(running=3, waiting=2, blocks_held=5, blocks_free=1, preemptions=4, prefix_hit_tokens=64)]
    metrics = Metrics()
    metrics.follow(lambda: loads[-1])
    sample = metrics.registry.get_sample_value
    assert sample("headway_requests_running") == 3
    assert sample("headway_kv_blocks", {"state": "held"}) == 5
    assert sample("headway_preemptions_total") == 4
    assert sample("headway_prefix_cache_tokens_total", {"result": "hit"}) == 64
    loads.append(Load(running=1))
    assert sample("headway_requests_running") == 1


def test_helpers_count() -> None:
    metrics = Metrics()
    metrics.tokens(prompt=7, output=3)
    metrics.cancelled("decode", "disconnect")
    metrics.refused("server_is_overloaded")
    metrics.speculated(proposed=4, accepted=2)
    metrics.stage("queue", 0.01)
    metrics.ttft.observe(0.05)
    sample = metrics.registry.get_sample_value
    assert sample("headway_tokens_total", {"kind": "prompt"}) == 7
    assert sample("headway_cancelled_total", {"phase": "decode", "cause": "disconnect"}) == 1
    assert sample("headway_refused_total", {"reason": "server_is_overloaded"}) == 1
    assert sample("headway_spec_tokens_total", {"outcome": "accepted"}) == 2
    assert sample("headway_stage_seconds_count", {"stage": "queue"}) == 1
    assert sample("headway_time_to_first_token_seconds_bucket", {"le": "0.06"}) == 1


def test_two_sets_of_metrics_do_not_meet() -> None:
    one, two = Metrics(), Metrics()
    one.refused("x")
    assert two.registry.get_sample_value("headway_refused_total", {"reason": "x"}) is None


def test_docs_are_made_from_the_table() -> None:
    docs = render_docs()
    assert all(f"| `{row.name}` | {row.kind} |" in docs for row in TABLE)
