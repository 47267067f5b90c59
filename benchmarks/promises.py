"""What the engine promises under load, beside its peers' servers: mixed lengths, closed loops, overload, two tenants.

usage: python -m benchmarks.promises CASE [--model smollm2-135m] [--rounds 2] [--server headway --server llama.cpp ...]
CASE: mixed (short chats at random instants beside 4,000-token prompts), streams (16 closed-loop streams, 128 tokens in,
64 out), overload (3 times what the server can do, for a minute), tenants (one sends ten times what the other does).
Rounds of the servers are interleaved, each on a server of its own; the client runs on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.common import head, row
from benchmarks.peer.servers import Served, served
from headway.bench.ask import Planned, Record, Target
from headway.bench.load import (
    ClosedLoop,
    LoadResult,
    OpenLoop,
    Plan,
    at_times,
    constant,
    merge,
    poisson,
    run_load,
    synthetic,
)
from headway.bench.measure import percentile
from headway.bench.prompts import Prompts

SHORT = ((40, 80), (30, 50))
"""Tokens in and out of a short chat."""
LONG_TOKENS = 4000
LOADS = {"smollm2-135m": (1.0, 12.0), "qwen2.5-coder-0.5b": (0.4, 40.0)}
"""Short chats a second, and seconds between two long prompts: about what this machine's headway can do."""


def run(server: Served, plan: Plan, *, duration_s: float | None = None, most: int | None = None) -> LoadResult:
    """Run a load; every answer has the length that was asked for."""
    target = Target(url=server.url, model=server.model, endpoint="completions", ignore_eos=True, timeout_s=600.0)
    return asyncio.run(run_load(plan, target, duration_s=duration_s, most_requests=most))


def gaps_ms(records: Iterable[Record]) -> list[float]:
    """Return the gaps between deltas."""
    return [1e3 * gap for record in records for gap in record.gaps_s]


def ttfts_ms(records: Iterable[Record]) -> list[float]:
    """Return the times to the first content."""
    return [1e3 * record.ttft_s for record in records if record.ttft_s is not None]


def warm(server: Served) -> None:
    """Run a few requests, so that no figure holds what happens once."""
    plan = ClosedLoop(requests=_short(99), concurrency=2)
    run(server, plan, most=4)


def _short(seed: int, tag: str = "short") -> Iterator[Planned]:
    return synthetic(Prompts(seed), input_tokens=SHORT[0], output_tokens=SHORT[1], seed=seed, tag=tag)


def mixed(server: Served, seed: int, model: str) -> dict[str, float]:
    """Short chats at random instants, a long prompt every few seconds."""
    rate, every_s = LOADS[model]
    long = synthetic(Prompts(seed + 1), input_tokens=(LONG_TOKENS,) * 2, output_tokens=(8, 8), seed=seed, tag="long")
    plan = OpenLoop(
        requests=merge(at_times(_short(seed), poisson(rate, seed)), at_times(long, constant(1.0 / every_s)))
    )
    result = run(server, plan, duration_s=6 * every_s)
    short, longs = result.tagged("short"), result.tagged("long")
    gaps, waits = gaps_ms(short), ttfts_ms(short)
    return {
        "ITL of the short streams, p50, ms": percentile(gaps, 0.5),
        "ITL of the short streams, p99, ms": percentile(gaps, 0.99),
        "p99 / p50 of the ITL": percentile(gaps, 0.99) / percentile(gaps, 0.5),
        "TTFT of the short ones, p50, ms": percentile(waits, 0.5),
        "TTFT of the short ones, p95, ms": percentile(waits, 0.95),
        "TTFT of the long ones, median, ms": percentile(ttfts_ms(longs), 0.5),
        "completed of short and long": sum(r.outcome == "completed" for r in (*short, *longs)),
        "refused or failed": sum(r.outcome != "completed" for r in (*short, *longs)),
    }


def streams(server: Served, seed: int, model: str) -> dict[str, float]:
    """16 closed-loop streams of 128 tokens in and 64 out."""
    del model
    requests = synthetic(Prompts(seed), input_tokens=(128, 128), output_tokens=(64, 64), seed=seed)
    result = run(server, ClosedLoop(requests=requests, concurrency=16), most=48)
    done = [record for record in result.counted if record.outcome == "completed"]
    waits, tokens = ttfts_ms(done), sum(record.output_tokens for record in done)
    return {
        "TTFT p50, ms": percentile(waits, 0.5),
        "TTFT p95, ms": percentile(waits, 0.95),
        "TPOT p50, ms": statistics.median(1e3 * (record.tpot_s or 0.0) for record in done),
        "output tokens/s": tokens / result.seconds,
        "failed": len(result.counted) - len(done),
    }


def compare(case: str, model: str, rounds: int, names: Sequence[str]) -> None:
    """Print each figure of each server, and the ratios of the rounds' pairs."""
    measure = {"mixed": mixed, "streams": streams}[case]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names:
            with served(name, model) as server:
                warm(server)
                found[name].append(measure(server, 10 * turn, model))
                print(f"<!-- {name} {json.dumps(found[name][-1])} -->", flush=True)
    others = [name for name in names if name != "headway"]
    head(f"benchmarks.promises {case} --model {model}", ("figure", *names, *(f"headway / {name}" for name in others)))
    for figure in found[names[0]][0]:
        rows = {name: [one[figure] for one in found[name]] for name in names}
        cells = [_spread(rows[name]) for name in names]
        for name in others:
            pairs = [a / b for a, b in zip(rows["headway"], rows[name], strict=True) if b]
            cells.append(_spread(pairs, 2) if pairs else "-")
        print(f"| {figure} | {' | '.join(cells)} |", flush=True)


def _spread(values: Sequence[float], digits: int | None = None) -> str:
    digits = digits if digits is not None else (2 if max(values) < 20 else 0)
    low, high, middle = min(values), max(values), statistics.median(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def capacity(server: Served) -> float:
    """Return the short chats a second that a closed loop gets through."""
    result = run(server, ClosedLoop(requests=_short(7), concurrency=32), most=96)
    return len(result.counted) / result.seconds


def _get(server: Served, path: str) -> dict[str, float]:
    with urllib.request.urlopen(server.url + path, timeout=10) as answer:
        found: dict[str, float] = json.load(answer)
        return found


def overload(model: str, rounds: int) -> None:
    """Three times the capacity for a minute, everybody promised a first token within two seconds."""
    head(f"benchmarks.promises overload --model {model}")
    rows: dict[str, list[float]] = {}
    for turn in range(rounds):
        # A pool that is full after the warm-up: what grows later is no cache.
        with served("headway", model, options=("--kv-memory", "256MiB")) as server:
            able = capacity(server)
            before = server.resident_mb()
            asked = (_with_class(planned) for planned in _short(100 + turn))
            result = run(server, OpenLoop(requests=at_times(asked, poisson(3 * able, turn))), duration_s=60.0)
            until = time.monotonic() + 5.0
            while (load := _get(server, "/health/load"))["blocks_held"] and time.monotonic() < until:
                time.sleep(0.05)
            figures = _overloaded(result, able) | {
                "resident memory added, MB": server.resident_mb() - before,
                "blocks held afterwards": load["blocks_held"],
            }
        for name, value in figures.items():
            rows.setdefault(name, []).append(value)
    for name, values in rows.items():
        row(name, values, "", digits=2)


def _with_class(planned: Planned) -> Planned:
    return Planned(
        prompt=planned.prompt,
        output_tokens=planned.output_tokens,
        input_tokens=planned.input_tokens,
        headers={"x-slo-class": "interactive"},
    )


def _overloaded(result: LoadResult, able: float) -> dict[str, float]:
    records = sorted(result.counted, key=lambda record: record.scheduled_s)
    taken = [record for record in records if record.outcome == "completed"]
    refused = [record for record in records if record.outcome == "refused"]
    # The target counts from the request's arrival at the server; the wire and this client's lag are in it too.
    in_time = [record for record in taken if record.ttft_from_sent_s is not None and record.ttft_from_sent_s <= 2.0]
    sent = sorted(record.sent_s for record in taken)
    honest, examined = 0, 0
    for record in refused:
        later = next((at for at in sent if at > record.sent_s), None)
        if later is None or record.retry_after_s is None:
            continue
        examined += 1
        really = later - record.sent_s
        honest += 0.5 <= (record.retry_after_s + 0.05) / (really + 0.05) <= 2.0
    return {
        "capacity, requests/s": able,
        "offered, requests": len(records),
        "accepted": len(taken),
        "accepted and in time, share": len(in_time) / max(1, len(taken)),
        "refused": len(refused),
        "failed": len(records) - len(taken) - len(refused),
        "refusals answered, p50, ms": percentile([1e3 * (r.done_s - r.sent_s) for r in refused], 0.5),
        "refusals answered, p99, ms": percentile([1e3 * (r.done_s - r.sent_s) for r in refused], 0.99),
        "Retry-After, median, s": percentile([r.retry_after_s or 0.0 for r in refused], 0.5),
        "Retry-After within 2x of the next acceptance, share": honest / max(1, examined),
        "accepted requests/s over capacity": len(taken) / result.seconds / able,
        "TTFT of the accepted, p95, ms": percentile(ttfts_ms(taken), 0.95),
        "client's own lag, p99, ms": percentile([1e3 * r.lag_s for r in records], 0.99),
    }


def tenants(model: str, rounds: int) -> None:
    """A small tenant at a quarter of the capacity, alone (on all threads, and on half of them) and beside a big one."""
    head(f"benchmarks.promises tenants --model {model}")
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "headway.yaml"
        config.write_text(f"model: {model}\nserver: {{tenant_header: x-tenant}}\n", encoding="utf-8")
        for turn in range(rounds):
            with served("headway", model) as server:
                rate = capacity(server) / 4
            waits = {}
            for name, threads, big in (
                ("alone", 2, False),
                ("alone on half the threads", 1, False),
                ("beside", 2, True),
            ):
                with served("headway", model, threads=threads, options=("--config", str(config))) as server:
                    warm(server)
                    kinds = [at_times(_of_tenant("small", turn), poisson(rate, turn))]
                    if big:
                        kinds.append(at_times(_of_tenant("big", turn + 50), poisson(10 * rate, turn + 50)))
                    result = run(server, OpenLoop(requests=merge(*kinds)), duration_s=45.0)
                    small = result.tagged("small")
                    waits[name] = percentile(ttfts_ms(small), 0.95)
                    rows.setdefault(f"small tenant {name}: TTFT p95, ms", []).append(waits[name])
                    lost = sum(record.outcome != "completed" for record in small)
                    rows.setdefault(f"small tenant {name}: refused or failed", []).append(lost)
                    if big:
                        others = result.tagged("big")
                        taken = sum(record.outcome == "completed" for record in others)
                        rows.setdefault("big tenant: accepted, share", []).append(taken / max(1, len(others)))
            rows.setdefault("beside / alone", []).append(waits["beside"] / waits["alone"])
            rows.setdefault("beside / alone on half the threads", []).append(
                waits["beside"] / waits["alone on half the threads"]
            )
    for name, values in rows.items():
        row(name, values, "", digits=2)


def _of_tenant(tenant: str, seed: int) -> Iterator[Planned]:
    for planned in _short(seed, tenant):
        yield Planned(
            prompt=planned.prompt,
            output_tokens=planned.output_tokens,
            input_tokens=planned.input_tokens,
            headers={"x-tenant": tenant, "x-slo-class": "interactive"},
            tag=tenant,
        )


def main() -> None:
    """Run one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=("mixed", "streams", "overload", "tenants"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--server", action="append", choices=("headway", "llama.cpp", "vllm"))
    arguments = parser.parse_args()
    if arguments.case == "overload":
        overload(arguments.model, arguments.rounds)
    elif arguments.case == "tenants":
        tenants(arguments.model, arguments.rounds)
    else:
        compare(arguments.case, arguments.model, arguments.rounds, arguments.server or ["headway", "llama.cpp"])


if __name__ == "__main__":
    main()
