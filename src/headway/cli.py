"""The command line: parses, then calls. Data goes to stdout, logs and progress to stderr."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from headway import __version__
from headway.config import MOST_THREADS, Config, load_config, parse_bytes
from headway.errors import ClientError, ConfigError, HeadwayError
from headway.telemetry.log import setup_logging

DEFAULT_MODEL = "smollm2-135m"
MODEL_HELP = "alias, directory, .gguf file or hub id (default: %(default)s)"
KERNELS = ("auto", "cpu", "cuda", "reference")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


_positive.__name__ = "positive integer"


def _threads(text: str) -> int:
    value = _positive(text)
    if value > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{value} is more than {MOST_THREADS}")
    return value


_threads.__name__ = "positive integer"


def _measure(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


_measure.__name__ = "positive number"


def _from_zero(text: str) -> float:
    return 0.0 if float(text) == 0 else _measure(text)


_from_zero.__name__ = "number from 0"


def _span(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    span = int(least), int(most or least)
    if not 1 <= span[0] <= span[1]:
        raise ValueError(text)
    return span


_span.__name__ = "N or MIN-MAX"


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no header: expected 'Name: value'")
    return name.strip(), value.strip()


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port: it must be from 0 to 65535")
    return value


_port.__name__ = "port"


def _memory(text: str) -> str:
    try:
        parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    return text


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)


def _engine(parser: argparse.ArgumentParser) -> None:
    """Settings of the engine that every command which runs a model takes."""
    parser.add_argument("--kernels", choices=KERNELS, help="implementation of the Ops (default: auto)")
    parser.add_argument(
        "--threads", type=_threads, metavar="N", help="compute threads (default: what the cgroup allows)"
    )
    parser.add_argument(
        "--kv-memory", type=_memory, metavar="SIZE", help="memory of the KV cache, such as 2GiB (default: measured)"
    )
    parser.add_argument(
        "--kv-dtype", choices=("bf16", "int8"), help="how the native kernels keep K and V (default: bf16)"
    )
    parser.add_argument(
        "--weights", choices=("file", "int8", "int4"), help="round the weights as they are loaded (default: file)"
    )
    parser.add_argument(
        "--prefill", choices=("exact", "fast"), help="fast trades exact repetition for speed on AMX (default: exact)"
    )


def _bench_serve(serve: argparse.ArgumentParser) -> None:
    """Options of the load generator; those that shape requests are None when not given, since a trace excludes them."""
    add = serve.add_argument
    add("--url", required=True, metavar="U", help="the server, such as http://127.0.0.1:8000, with or without /v1")
    add("--model", required=True, metavar="M", help="the model's name at that server")
    load = serve.add_mutually_exclusive_group(required=True)
    load.add_argument(
        "--rate", type=_measure, metavar="R", help="open loop: requests a second, whatever the server does"
    )
    load.add_argument("--concurrency", type=_positive, metavar="C", help="closed loop: streams that wait for answers")
    load.add_argument("--trace", type=Path, metavar="F.jsonl", help="replay a trace in the Mooncake format")
    add("--arrivals", choices=("poisson", "constant"), help="of --rate (default: poisson)")
    add("--speed", type=_measure, metavar="X", help="of --trace: so many times as fast (default: 1)")
    add("--duration", type=_measure, metavar="S", help="send for so many seconds after the warm-up")
    add("--requests", type=_positive, metavar="N", help="send at most so many requests that count")
    add("--warmup", type=_from_zero, default=0.0, metavar="S", help="send for so many seconds that do not count")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of arrivals, lengths and prompts; a server's cache may know a run's by now (default: %(default)s)",
    )
    add("--input-tokens", type=_span, metavar="N|MIN-MAX", help="length of prompts (default: 128)")
    add("--output-tokens", type=_span, metavar="N|MIN-MAX", help="max_tokens of answers (default: 64)")
    add("--shared-prefix-tokens", type=_positive, metavar="N", help="how much of each prompt is the same in all")
    add("--endpoint", choices=("chat", "completions"), default="chat", help="default: %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)s (greedy)")
    add("--ignore-eos", action="store_true", help="ask for answers of the full length; not every server knows it")
    add("--api-key", metavar="K", help="bearer token (default: OPENAI_API_KEY)")
    add("--header", type=_header, action="append", default=[], metavar="'Name: value'", help="repeatable")
    add("--slo-ttft-ms", type=_measure, metavar="X", help="goodput: the first token comes within this")
    add(
        "--slo-tpot-ms",
        type=_measure,
        metavar="X",
        help="goodput: a token after the first takes at most this, on average",
    )
    add("--slo-itl-ms", type=_measure, metavar="X", help="goodput: no gap between two deltas is longer")
    add("--timeout", type=_measure, default=300.0, metavar="S", help="limit of a request (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    add("--html", type=Path, metavar="FILE", help="also write a page with plots")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; docs/cli.md is generated from it."""
    parser = argparse.ArgumentParser(
        prog="headway", description="Serves language models with a latency you can predict, account for and prove."
    )
    parser.add_argument("--version", action="version", version=f"headway {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="more log lines on stderr")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="start the OpenAI-compatible server")
    serve.add_argument(
        "model",
        nargs="?",
        default=None,
        metavar="MODEL",
        help=f"{MODEL_HELP.split(' (')[0]} (default: {DEFAULT_MODEL})",
    )
    serve.add_argument("--host", metavar="H", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=_port, metavar="N", help="port to listen on, 0 for any (default: 8000)")
    serve.add_argument("--config", type=Path, metavar="FILE", help="headway.yaml with any of the settings")
    _engine(serve)

    pull = commands.add_parser("pull", help="fetch a model into the cache")
    pull.add_argument("name", metavar="ALIAS|HUB_ID", help="what to fetch; `headway models` lists the aliases")
    pull.add_argument("--json", action="store_true", help="print one JSON object")

    models = commands.add_parser("models", help="list the aliases, what is cached, sizes")
    models.add_argument("--json", action="store_true", help="print one JSON object a line")

    generate = commands.add_parser("generate", help="complete raw text, no chat template")
    _model(generate)
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt; `-` reads it from standard input")
    source.add_argument("--prompt-file", type=Path, metavar="F.jsonl", help='one {"prompt": ...} a line, run together')
    generate.add_argument("--max-tokens", type=_positive, default=128, metavar="N", help="default: %(default)s")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)s (greedy)")
    generate.add_argument("--seed", type=int, metavar="S", help="repeatable sampling")
    generate.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    _engine(generate)

    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    _model(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--max-tokens", type=_positive, default=512, metavar="N", help="default: %(default)s")
    chat.add_argument("--temperature", type=float, default=0.7, metavar="T", help="default: %(default)s")
    chat.add_argument("--seed", type=int, metavar="S", help="repeatable sampling")
    _engine(chat)

    evaluate = commands.add_parser("eval", help="perplexity of a text, teacher-forced, no BOS added")
    _model(evaluate)
    evaluate.add_argument("--text-file", type=Path, required=True, metavar="F", help="UTF-8 text")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    _engine(evaluate)

    bench = commands.add_parser("bench", help="measure")
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)
    engine = kinds.add_parser("engine", help="decode and prefill rates of this machine, without HTTP")
    _model(engine)
    engine.add_argument(
        "--batches", default="1,4,8,16", metavar="LIST", help="decode batch sizes (default: %(default)s)"
    )
    engine.add_argument("--contexts", default="64,512", metavar="LIST", help="decode contexts (default: %(default)s)")
    engine.add_argument("--prefills", default="128,512", metavar="LIST", help="prompt lengths (default: %(default)s)")
    engine.add_argument(
        "--repeats", type=_positive, default=3, metavar="N", help="runs a figure (default: %(default)s)"
    )
    engine.add_argument("--profile", action="store_true", help="show where a step's time goes, by Op, instead of rates")
    engine.add_argument("--json", action="store_true", help="print one JSON object")
    _engine(engine)

    _bench_serve(kinds.add_parser("serve", help="load an OpenAI-compatible server and measure it as a client does"))

    doctor = commands.add_parser("doctor", help="what this machine offers, what headway chose, and why")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _settings(args: argparse.Namespace) -> Config:
    """Join file and command line; the command line wins."""
    return load_config(
        getattr(args, "config", None),
        {
            "model": args.model,
            "server.host": getattr(args, "host", None),
            "server.port": getattr(args, "port", None),
            "engine.kernels": args.kernels,
            "engine.threads": args.threads,
            "engine.kv_memory": args.kv_memory,
            "engine.kv_dtype": args.kv_dtype,
            "engine.weights": args.weights,
            "engine.prefill": args.prefill,
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 done, 1 failed, 2 wrong usage."""
    try:
        return _run(argv)
    finally:
        _settle(sys.stdout)
        _settle(sys.stderr)


def _run(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    try:
        if args.command == "serve":
            # This process computes nothing with BLAS, whose threads would spin beside the engine's.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            from headway.serve import serve

            config = _settings(args)
            setup_logging(level=level)
            return serve(config)
        from headway import commands

        logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        status = commands.run(args, _settings(args).engine if hasattr(args, "kernels") else None)
        sys.stdout.flush()
        return status
    except ClientError as error:
        print(f"headway: {error.message}", file=sys.stderr)
        return 2
    except HeadwayError as error:
        print(f"headway: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has left
        _give_up(sys.stdout)
        return 1
    except (OSError, UnicodeError) as error:
        # What no command foresaw: a full disk behind stdout, a folder that may not be entered, bytes that are no text.
        logging.getLogger("headway").info("the error in full", exc_info=True)
        _give_up(sys.stdout)
        named = getattr(error, "filename", None)
        reason = getattr(error, "strerror", None) or str(error)
        print(f"headway: {reason}" if named is None else f"headway: {str(named)!r}: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _settle(stream: TextIO) -> None:
    """Write what is left, or let it go: the interpreter would try again at its end, and give a status of its own."""
    try:
        stream.flush()
    except (OSError, ValueError):
        _give_up(stream)


def _give_up(stream: TextIO) -> None:
    """Let the stream's rest go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
