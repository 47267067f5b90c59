"""What the commands do, one function each; every one returns the exit status."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headway.config import EngineConfig, environment
from headway.errors import HeadwayError, InvalidRequest
from headway.types import EngineTiming, Message, Params


def run(args: argparse.Namespace, engine: EngineConfig | None) -> int:
    """Call the command that was parsed."""
    config = engine or EngineConfig()
    chosen: dict[str, Callable[[], int]] = {
        "pull": lambda: pull(args),
        "models": lambda: models(args),
        "generate": lambda: generate(args, config),
        "chat": lambda: chat(args, config),
        "eval": lambda: evaluate(args, config),
        "bench": lambda: _bench_serve(args) if args.bench == "serve" else bench_engine(args, config),
        "doctor": lambda: doctor(args),
    }
    return chosen[args.command]()


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


def pull(args: argparse.Namespace) -> int:
    """Fetch a model into the cache and print where it is."""
    from headway.models.pull import obtain

    path = obtain(args.name, environment())
    if args.json:
        _print_json({"name": args.name, "path": str(path), "bytes": _size(path)})
    else:
        print(path)
    return 0


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def models(args: argparse.Namespace) -> int:
    """List the aliases, what is cached, and sizes."""
    from headway.models.pull import listing

    for row in listing(environment()):
        alias = row.alias
        if args.json:
            _print_json(
                {
                    "alias": alias.name,
                    "about": alias.about,
                    "bytes": alias.nbytes,
                    "licence": alias.licence,
                    "cached": row.path is not None,
                    "path": None if row.path is None else str(row.path),
                }
            )
        else:
            state = "cached" if row.path is not None else "-"
            print(f"{alias.name:20} {alias.nbytes / 1e6:7.0f} MB  {state:7} {alias.about}")
    return 0


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> InvalidRequest:
    reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
    return InvalidRequest(f"cannot read {str(path)!r}: {reason}")


def _prompts(args: argparse.Namespace) -> list[str]:
    """Read the prompts; errors name the file and the line."""
    if args.prompt is not None:
        return [sys.stdin.read() if args.prompt == "-" else args.prompt]
    prompts = []
    try:
        lines = args.prompt_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(args.prompt_file, error) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row if isinstance(row, str) else row["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise InvalidRequest(f'{args.prompt_file}:{number}: expected a JSON object with a text "prompt"')
        prompts.append(prompt)
    return prompts


def timing_json(timing: EngineTiming) -> dict[str, Any]:
    """Return the engine's own stages of one offline request in the shape of the server's ``timing``."""
    marks = [
        ("queue", timing.received, timing.scheduled),
        ("prefill", timing.scheduled, timing.prefilled),
        ("first_token", timing.prefilled, timing.first_token),
        ("decode", timing.first_token, timing.finished),
    ]
    stages = [
        {"stage": name, "start_ms": round(1e3 * (a - timing.received), 3), "ms": round(1e3 * (b - a), 3)}
        for name, a, b in marks
    ]
    ttft_ms = round(1e3 * (timing.first_token - timing.received), 3)
    return {
        "stages": stages,
        "ttft_ms": ttft_ms,
        "unattributed_ms": 0.0,
        "cached_tokens": timing.cached_tokens,
        "degraded": [],
    }


def generate(args: argparse.Namespace, config: EngineConfig) -> int:
    """Complete raw prompts."""
    from headway.llm import LLM

    prompts = _prompts(args)
    params = Params(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    with LLM(args.model, config=config) as llm:
        if not args.json and len(prompts) == 1:
            for chunk in llm.stream(prompts[0], params):
                print(chunk.text, end="", flush=True)
            print()
            return 0
        for prompt, answer in zip(prompts, llm.generate(prompts, params) if prompts else [], strict=True):
            if not args.json:
                print(answer.text)
                continue
            _print_json(
                {
                    "prompt": prompt,
                    "prompt_token_ids": answer.prompt_token_ids,
                    "token_ids": answer.token_ids,
                    "text": answer.text,
                    "finish_reason": answer.finish,
                    "usage": {
                        "prompt_tokens": answer.usage.prompt_tokens,
                        "completion_tokens": answer.usage.completion_tokens,
                        "total_tokens": answer.usage.prompt_tokens + answer.usage.completion_tokens,
                        "prompt_tokens_details": {"cached_tokens": answer.usage.cached_tokens},
                    },
                    "timing": timing_json(answer.timing),
                }
            )
    return 0


def chat(args: argparse.Namespace, config: EngineConfig) -> int:
    """Talk until end of input, or an empty line in a terminal; TTFT and rate of each answer go to stderr."""
    from headway.llm import LLM

    talk: list[Message] = [Message(role="system", content=args.system)] if args.system else []
    params = Params(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its editing, and lines beyond the terminal's 4,096 bytes
    with LLM(args.model, config=config) as llm:
        print(f"{args.model} on {llm.started.kernels}; \\ goes on in the next line, Ctrl-D ends", file=sys.stderr)
        while True:
            line = _line(terminal)
            if line is None or (terminal and not line.strip()):
                return 0
            if not line.strip():
                continue
            talk.append(Message(role="user", content=line))
            try:
                talk.append(Message(role="assistant", content=_answer(llm, talk, params)))
            except InvalidRequest as error:  # the conversation has outgrown the context
                print(f"headway: {error.message}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                talk.pop()
                print("\n(stopped)", file=sys.stderr)


def _line(terminal: bool) -> str | None:
    """Return what was typed, without the backslashes that join lines; None at the end of input."""
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else "> ") if terminal else "")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _answer(llm: Any, talk: list[Message], params: Params) -> str:
    text, last = "", None
    for chunk in llm.stream(list(talk), params):
        print(chunk.text, end="", flush=True)
        text += chunk.text
        last = chunk
    print()
    if last is not None and last.timing is not None and last.usage is not None:
        timing, tokens = last.timing, last.usage.completion_tokens
        spent = timing.finished - timing.first_token
        rate = f"{(tokens - 1) / spent:.1f} tokens/s" if tokens > 1 and spent > 0 else "one token"
        print(f"[TTFT {1e3 * (timing.first_token - timing.received):.0f} ms, {rate}]", file=sys.stderr)
    return text


def evaluate(args: argparse.Namespace, config: EngineConfig) -> int:
    """Print the perplexity of a text."""
    from headway.llm import LLM

    try:
        text = args.text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(args.text_file, error) from error
    with LLM(args.model, config=config) as llm:
        score = llm.score(text)
    if args.json:
        _print_json(msgspec.to_builtins(score))
    else:
        print(f"{score.n_tokens} tokens, log-probability {score.sum_logprob:.4f}, perplexity {score.perplexity:.4f}")
    return 0


def bench_engine(args: argparse.Namespace, config: EngineConfig) -> int:
    """Measure decode and prefill on this machine."""
    from headway.bench.engine import measure, table
    from headway.bench.profile import profile, render
    from headway.llm import LLM
    from headway.workload import EngineWorkload

    def numbers(text: str, name: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",") if part.strip()]
        except ValueError:
            values = [0]
        if not values or min(values) < 1:
            raise InvalidRequest(f"--{name} {text!r}: expected positive integers, separated by commas")
        return values

    batches, contexts = numbers(args.batches, "batches"), numbers(args.contexts, "contexts")
    prefills = numbers(args.prefills, "prefills")
    with LLM(args.model, config=msgspec.structs.replace(config, prefix_cache=False)) as llm:
        limit = llm.started.context_tokens
        for name, most in (("contexts", max(contexts)), ("prefills", max(prefills))):
            if most > limit:
                raise InvalidRequest(f"--{name} {most}: the model's context is {limit} tokens")
        workload = EngineWorkload(llm)
        cases = [(batch, context) for context in contexts for batch in batches]
        if args.profile:
            for case in cases:
                workload.decode_step_s(*case)
            profiles = profile(workload, cases, prefills)
        else:
            report = measure(workload, batches=batches, contexts=contexts, prefills=prefills, repeats=args.repeats)
    if args.profile:
        if args.json:
            _print_json({"model": args.model, "profiles": msgspec.to_builtins(profiles)})
        else:
            print(render(profiles))
    elif args.json:
        _print_json(msgspec.to_builtins(report))
    else:
        print(table(report))
    return 0


def _bench_serve(args: argparse.Namespace) -> int:
    from headway.bench.command import bench_serve

    return bench_serve(args, environment())


def doctor(args: argparse.Namespace) -> int:
    """Say what the machine offers and what was chosen."""
    from headway.doctor import examine, render

    findings = examine(environment())
    if args.json:
        _print_json(msgspec.to_builtins(findings))
    else:
        print(render(findings))
    return 0


__all__ = ["HeadwayError", "run"]
