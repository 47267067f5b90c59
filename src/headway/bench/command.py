"""``headway bench serve``: a plan from the command line, a run, and its figures as a table, JSON or a page."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator

from headway.bench.ask import Planned, Target
from headway.bench.client import Connections
from headway.bench.load import (
    ClosedLoop,
    LoadResult,
    OpenLoop,
    Plan,
    Progress,
    at_times,
    constant,
    poisson,
    replay,
    run_load,
    synthetic,
)
from headway.bench.prompts import Prompts, words_per_token
from headway.bench.report import render
from headway.bench.summary import Slo, report_json, table
from headway.bench.trace import TraceRow, read_trace
from headway.config import Environment
from headway.errors import InvalidRequest

LINE_S = 10.0
"""How often progress is written where stderr is no terminal."""
INPUT_TOKENS = (128, 128)
OUTPUT_TOKENS = (64, 64)


def bench_serve(args: argparse.Namespace, environment: Environment) -> int:
    """Run the load that was asked for; return 0 when at least one request completed, 1 otherwise."""
    _check(args)
    target = Target(
        url=args.url,
        model=args.model,
        endpoint=args.endpoint,
        api_key=args.api_key or environment.openai_api_key or None,
        headers=dict(args.header),
        timeout_s=args.timeout,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
    )
    target.origin()
    rows = read_trace(args.trace, speed=args.speed or 1.0) if args.trace else []
    _allow_connections()
    with _progress() as show, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        result = runner.run(_run(args, target, rows, show))
    slo = Slo(ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms, itl_ms=args.slo_itl_ms)
    report = report_json(result, model=args.model, url=args.url, mode=mode(args), seed=args.seed, slo=slo)
    print(json.dumps(report, ensure_ascii=False) if args.json else table(report), flush=True)
    if args.html is not None:  # last: a page that cannot be written does not take the figures with it
        args.html.write_text(render(report, result), encoding="utf-8")
    if not report["completed"]:
        _explain(result)
    return 0 if report["completed"] else 1


def mode(args: argparse.Namespace) -> str:
    """Return how load was made, in the command line's words."""
    if args.rate is not None:
        return f"rate={args.rate:g} arrivals={args.arrivals or 'poisson'}"
    if args.concurrency is not None:
        return f"concurrency={args.concurrency}"
    return f"trace={args.trace} speed={args.speed or 1.0:g}"


def _check(args: argparse.Namespace) -> None:
    if args.speed is not None and args.trace is None:
        raise InvalidRequest(f"--speed {args.speed:g}: only a --trace has a speed")
    if args.arrivals is not None and args.rate is None:
        raise InvalidRequest(f"--arrivals {args.arrivals}: only a --rate has arrivals")
    if args.trace is None and args.duration is None and args.requests is None:
        raise InvalidRequest("give --duration S or --requests N: without either the run has no end")
    if args.trace is not None:
        for name in ("input_tokens", "output_tokens", "shared_prefix_tokens"):
            if getattr(args, name) is not None:
                raise InvalidRequest(f"--{name.replace('_', '-')}: a --trace says itself how long its requests are")
    least = (args.input_tokens or INPUT_TOKENS)[0]
    if args.shared_prefix_tokens is not None and args.shared_prefix_tokens >= least:
        raise InvalidRequest(
            f"--shared-prefix-tokens {args.shared_prefix_tokens}: must be less than --input-tokens ({least})"
        )
    if args.html is not None and not args.html.parent.is_dir():
        raise InvalidRequest(f"--html {str(args.html)!r}: no such folder")


async def _run(
    args: argparse.Namespace, target: Target, rows: list[TraceRow], show: Callable[[Progress], None]
) -> LoadResult:
    connections = Connections(target.origin())
    ratio = await words_per_token(connections, target)
    connections.close()
    return await run_load(
        _plan(args, Prompts(args.seed, ratio), rows),
        target,
        duration_s=args.duration,
        most_requests=args.requests,
        warmup_s=args.warmup,
        on_progress=show,
    )


def _plan(args: argparse.Namespace, prompts: Prompts, rows: list[TraceRow]) -> Plan:
    if args.trace is not None:
        return OpenLoop(requests=replay(rows, prompts))
    requests: Iterator[Planned] = synthetic(
        prompts,
        input_tokens=args.input_tokens or INPUT_TOKENS,
        output_tokens=args.output_tokens or OUTPUT_TOKENS,
        shared_tokens=args.shared_prefix_tokens or 0,
        seed=args.seed,
    )
    if args.concurrency is not None:
        return ClosedLoop(requests=requests, concurrency=args.concurrency)
    times = constant(args.rate) if args.arrivals == "constant" else poisson(args.rate, args.seed)
    return OpenLoop(requests=at_times(requests, times))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not built for this platform: asyncio's own loop is late by half a millisecond more
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _allow_connections() -> None:
    """Raise the limit of open files as far as this user may: an open loop holds a connection a waiting request."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Yield what shows progress on stderr: a line that changes in a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live

        # Refreshed by hand: rich's own thread would take turns with the event loop that measures.
        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            yield lambda progress: live.update(_line(progress), refresh=True)
        return
    last = 0.0

    def write(progress: Progress) -> None:
        nonlocal last
        if progress.elapsed_s - last >= LINE_S:
            last = progress.elapsed_s
            print(_line(progress), file=sys.stderr, flush=True)

    yield write


def _line(progress: Progress) -> str:
    return (
        f"{progress.elapsed_s:.0f} s: {progress.sent} sent, {progress.running} in flight, "
        f"{progress.completed} completed, {progress.refused} refused, {progress.errors} errors"
    )


def _explain(result: LoadResult) -> None:
    """Say why nothing completed, with the server's or the system's own words."""
    failed = next((record for record in result.counted if record.outcome != "completed"), None)
    if failed is None:
        print("headway: no request was sent: the run was shorter than the first arrival", file=sys.stderr)
    else:
        kind = failed.error or f"refused with {failed.status}"
        print(f"headway: no request completed; the first: {kind}: {' '.join(failed.detail.split())}", file=sys.stderr)
