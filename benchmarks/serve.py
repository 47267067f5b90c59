"""What a user of `headway serve` sees on a real model: start, prefix cache, overtaking, streams together.

usage: python -m benchmarks.serve [--model smollm2-135m] [--repeats 5]
Prints a table for docs/performance.md; figures are medians with least and greatest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import openai
from tests.server import Server, serving

from benchmarks.common import head, row


def words(seed: int, tokens: int) -> str:
    """Return a prompt of about so many tokens that no other seed shares a beginning with."""
    rng = random.Random(seed)
    vocabulary = [
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "that",
        "for",
        "it",
        "was",
        "on",
        "as",
        "with",
        "his",
        "they",
        "at",
        "be",
        "this",
        "from",
        "have",
        "or",
        "by",
        "one",
        "had",
        "not",
    ]
    return f"{seed} " + " ".join(rng.choice(vocabulary) for _ in range(tokens))


def ttft(client: openai.OpenAI, model: str, system: str, user: str) -> tuple[float, int, int]:
    """Return (seconds to the first content, prompt tokens, cached tokens) of a streamed chat."""
    began = time.perf_counter()
    first = 0.0
    prompt = cached = 0
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
        temperature=0,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.choices and chunk.choices[0].delta.content and not first:
            first = time.perf_counter() - began
        if chunk.usage is not None:
            prompt = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            cached = (details.cached_tokens if details else 0) or 0
    return first, prompt, cached


def prefix(client: openai.OpenAI, server: Server, repeats: int) -> None:
    """The same 1,500-token system prompt a second time, with another question."""
    ratios, firsts, seconds, shares = [], [], [], []
    for seed in range(repeats):
        system = words(seed, 1450)
        first_s, _, _ = ttft(client, server.model, system, "What is this?")
        again_s, prompt, cached = ttft(client, server.model, system, "And what is that?")
        firsts.append(first_s * 1e3)
        seconds.append(again_s * 1e3)
        ratios.append(again_s / first_s)
        shares.append(cached / prompt)
    row("TTFT of a 1,500-token system prompt, first", firsts, "ms")
    row("TTFT of the same prompt, second", seconds, "ms")
    row("second / first", ratios, "", digits=3)
    row("share of the prompt reported as cached", shares, "", digits=3)


def overtaking(client: openai.OpenAI, server: Server, repeats: int) -> None:
    """A short request that arrives during a 4,000-token prefill."""
    shorts, longs = [], []
    for seed in range(repeats):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            long = pool.submit(ttft, client, server.model, words(1000 + seed, 3950), "Why?")
            time.sleep(0.3)
            short_s, _, _ = ttft(client, server.model, f"Be short. {seed}", "Hi")
            shorts.append(short_s * 1e3)
            longs.append(long.result()[0] * 1e3)
    row("TTFT of a short request during a 4,000-token prefill", shorts, "ms")
    row("TTFT of that long request", longs, "ms")


def together(client: openai.OpenAI, server: Server) -> None:
    """16 streams of different lengths at once, against each alone."""

    def answer(index: int) -> list[int]:
        reply = client.completions.create(
            model=server.model,
            prompt=words(2000 + index, 10 + 20 * index),
            max_tokens=16 + 4 * index,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        ids: list[int] = json.loads(reply.to_json())["choices"][0]["token_ids"]
        return ids

    alone = [answer(index) for index in range(16)]
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(answer, range(16)))
    spent = time.perf_counter() - began
    same = sum(a == b for a, b in zip(alone, crowd, strict=True))
    print(f"| 16 streams together: token ids equal to alone | {same} of 16 | |")
    print(f"| 16 streams together: output tokens/s | {sum(map(len, crowd)) / spent:.0f} | |")


def single(client: openai.OpenAI, server: Server, repeats: int) -> None:
    """One stream's rate, HTTP included."""
    rates = []
    for seed in range(repeats):
        times: list[float] = []
        for chunk in client.completions.create(
            model=server.model,
            prompt=words(3000 + seed, 20),
            max_tokens=64,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            if chunk.choices and chunk.choices[0].text:
                times.append(time.perf_counter())
        rates.append((len(times) - 1) / (times[-1] - times[0]))
    row("one stream, tokens/s", rates, "", digits=1)


def main() -> None:
    """Run everything against one server, and starts of others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    head(f"benchmarks.serve --model {arguments.model}")
    starts = []
    for _ in range(arguments.repeats):
        with serving(arguments.model) as server:
            starts.append(server.start_s)
    row("start to ready", starts, "s", digits=2)
    with serving(arguments.model) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        parts: list[Callable[[], None]] = [
            lambda: single(client, server, arguments.repeats),
            lambda: prefix(client, server, arguments.repeats),
            lambda: overtaking(client, server, max(1, arguments.repeats // 2)),
            lambda: together(client, server),
        ]
        for part in parts:
            part()
        print(f"| blocks held afterwards | {server.until_idle(5.0)['blocks_held']} | |")
        memory = Path(f"/proc/{server.engine_pid()}/status").read_text(encoding="ascii")
        resident = next(line.split()[1] for line in memory.splitlines() if line.startswith("VmRSS"))
        print(f"| resident memory of the engine process | {int(resident) / 1024:.0f} MB | |")
    assert statistics.median(starts) > 0


if __name__ == "__main__":
    main()
