"""One run as a page of HTML that needs nothing else: figures, distributions, and a line of time for each request."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from headway.bench import svg
from headway.bench.ask import Record
from headway.bench.load import LoadResult

MOST_BARS: Final = 300
"""Requests that the timeline draws; of more, every n-th."""
STYLE: Final = """
:root{color-scheme:light dark;--page:#fff;--ink:#1b1f24;--soft:#5b6570;--rule:#d9dee3;--wait:#c9a227;--stream:#2470b8;
--bad:#c0392b;--refused:#8e6bbf;--lag:#9aa4ae}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--ink:#e8ebee;--soft:#9aa5b0;--rule:#343b42;--wait:#e0bb45;
--stream:#64a8e8;--bad:#ff7466;--refused:#b79be6;--lag:#6b7681}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--page);color:var(--ink);
font:16px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.3rem;margin:.2rem 0}h2{font-size:1rem;margin:0 0 .3rem}p{color:var(--soft);margin:.3rem 0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:1.5rem;margin:1.5rem 0}
figure{margin:0}svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--rule);stroke-width:1}.curve{fill:none;stroke:var(--stream);stroke-width:2}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.5rem 0 1.5rem}
th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid var(--rule)}
th:first-child,td:first-child{text-align:left;padding-left:0}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .3em 0 .8em;vertical-align:-.05em}
"""
METRICS: Final = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("end to end", "e2e_ms"))
COLOURS: Final = {"waits": "wait", "streams": "stream", "refused": "refused", "error": "bad", "sent late": "lag"}


def render(report: dict[str, Any], result: LoadResult) -> str:
    """Return the page; ``report`` is the run's JSON object, ``result`` what it was made from."""
    done = [record for record in result.counted if record.outcome == "completed"]
    first = [1e3 * record.ttft_s for record in done if record.ttft_s is not None]
    gaps = [1e3 * gap for record in done for gap in record.gaps_s]
    title = f"{report['model']}: {report['mode']}"
    figures = [
        _plot("Time to first token", svg.cumulative("Share of requests by time to first token", "ms", first)),
        _plot("Between two deltas", svg.cumulative("Share of gaps by length", "ms", gaps)),
        _plot("Requests in time", _timeline(result), _key(result)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(str(report['url']))}, seed {escape(str(report['seed']))}</p>"
        f'{_latencies(report)}<div class="plots">{"".join(figures)}</div>'
        f"{_rates(report)}{_lag_note(report)}</body></html>\n"
    )


def _plot(title: str, picture: str, note: str = "") -> str:
    return f"<figure><h2>{escape(title)}</h2>{picture}{note}</figure>"


def _timeline(result: LoadResult) -> str:
    records = sorted(result.records, key=lambda record: record.scheduled_s)
    step = -(-len(records) // MOST_BARS) or 1
    bars = [_bar(record) for record in records[::step]]
    end = max((record.done_s for record in records), default=0.0)
    return svg.timeline("Each request from when it was due to its end", bars, end)


def _bar(record: Record) -> svg.Bar:
    edges: tuple[float, ...] = (record.scheduled_s, record.sent_s, record.done_s)
    colours: tuple[str, ...] = ("lag", {"completed": "wait", "refused": "refused", "error": "bad"}[record.outcome])
    if record.outcome == "completed" and record.first_s is not None:
        edges = (record.scheduled_s, record.sent_s, record.first_s, record.done_s)
        colours = ("lag", "wait", "stream")
    first = "" if record.ttft_s is None else f", first token after {1e3 * record.ttft_s:.0f} ms"
    kind = f" ({record.error})" if record.error else ""
    warm = ", warm-up" if record.warm_up else ""
    tag = f"{record.tag}: " if record.tag else ""
    title = f"{tag}{record.outcome}{kind}{warm}, due at {record.scheduled_s:.2f} s{first}, {record.e2e_s:.2f} s in all"
    return svg.Bar(edges=edges, colours=colours, title=title)


def _key(result: LoadResult) -> str:
    step = -(-len(result.records) // MOST_BARS) or 1
    keys = "".join(f'<span class="key" style="background:var(--{var})"></span>{name}' for name, var in COLOURS.items())
    some = f"; one request in {step} is drawn" if step > 1 else ""
    return f"<p>{keys}{some}</p>"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _latencies(report: dict[str, Any]) -> str:
    rows = [[name, *(_cell(value) for value in report[key].values())] for name, key in METRICS]
    return _table(["milliseconds", "p50", "p90", "p95", "p99", "mean"], rows)


def _rates(report: dict[str, Any]) -> str:
    rows = [
        ["requests", str(report["requests"])],
        ["completed", str(report["completed"])],
        ["refused", str(report["refused"])],
        ["errors", str(report["errors"])],
        *([f"error: {kind}", str(count)] for kind, count in report["errors_by_kind"].items()),
        ["measured seconds", _cell(report["seconds"])],
        ["output tokens a second", _cell(report["tokens_per_s"])],
        ["requests a second", _cell(report["requests_per_s"])],
        ["good requests a second", _cell(report["goodput_per_s"])],
        *([f"promised {name}", _cell(value)] for name, value in report["slo"].items() if value is not None),
        ["tokens in", str(report["input_tokens"])],
        ["tokens out", str(report["output_tokens"])],
        ["tokens counted by", str(report["tokens_counted_by"] or "-")],
        ["refusals answered in, p50 ms", _cell(report["refusal_ms"]["p50"])],
        ["retry after, p50 s", _cell(report["retry_after_s"]["p50"])],
    ]
    return _table(["", ""], rows)


def _lag_note(report: dict[str, Any]) -> str:
    lag, loop = report["lag_ms"], report["loop_lag_ms"]
    return (
        f"<p>Times count from when a request was due. The generator sent {_cell(lag['p50'])} ms late "
        f"(p99 {_cell(lag['p99'])}, max {_cell(lag['max'])}); its event loop was late by p99 {_cell(loop['p99'])} ms "
        f"(max {_cell(loop['max'])}).</p>"
    )
