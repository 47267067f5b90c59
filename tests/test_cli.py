"""The command line: data on stdout, one clear line on stderr, exit statuses 0, 1, 2."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli import main
from headway.kernels import machine
from headway.llm import LLM
from headway.types import Message
from tests.server import environ


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_prints_the_text(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", str(tiny_model), "--prompt", "the quick", "--max-tokens", "8")
    assert code == 0
    assert out.strip("\n")


def test_generate_as_json_has_the_contracts_fields(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", str(tiny_model), "--prompt", "the quick", "--max-tokens", "8", "--json")
    answer = json.loads(out)
    assert code == 0
    assert set(answer) == {
        "prompt", "prompt_token_ids", "token_ids", "text", "finish_reason", "usage", "timing",
    }  # fmt: skip
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] <= 8
    assert [stage["stage"] for stage in answer["timing"]["stages"]] == ["queue", "prefill", "first_token", "decode"]


def test_generate_answers_a_file_line_by_line(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the lazy dog"}\n\n"a token"\n', encoding="utf-8")
    code, out, _ = run(
        capsys, "generate", str(tiny_model), "--prompt-file", str(prompts), "--max-tokens", "4", "--json"
    )
    assert code == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["the lazy dog", "a token"]


def test_a_bad_line_is_named(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"text": 1}\n', encoding="utf-8")
    code, out, err = run(capsys, "generate", str(tiny_model), "--prompt-file", str(prompts))
    assert (code, out) == (2, "")
    assert f"{prompts}:2" in err


def test_seeds_repeat(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", str(tiny_model), "--prompt", "the", "--temperature", "1", "--seed", "7", "--json"]
    first, second = (json.loads(run(capsys, *argv)[1])["token_ids"] for _ in range(2))
    assert first == second


def test_eval_reports_the_perplexity(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog", encoding="utf-8")
    code, out, _ = run(capsys, "eval", str(tiny_model), "--text-file", str(text), "--json")
    score = json.loads(out)
    assert code == 0
    assert set(score) == {"n_tokens", "sum_logprob", "perplexity"}
    assert score["sum_logprob"] < 0 < score["perplexity"]


def test_chat_answers_each_line_and_shows_its_rate(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand again\n"))
    code, out, err = run(capsys, "chat", str(tiny_model), "--max-tokens", "6", "--seed", "1")
    assert code == 0
    assert out
    assert err.count("[TTFT ") == 2


def test_chat_joins_lines_and_passes_over_empty_ones_of_a_pipe(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(llm: object, talk: list[Message], params: object) -> str:
        asked.append(talk[-1].content if isinstance(talk[-1].content, str) else "")
        return "yes"

    monkeypatch.setattr("headway.commands._answer", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\\\ntwo\n\n  \nthree\nunfinished\\\n"))
    assert run(capsys, "chat", str(tiny_model))[0] == 0
    assert asked == ["one\ntwo", "three", "unfinished"]


@pytest.mark.parametrize("where", ["/dev/full", "closed pipe"])
def test_output_that_cannot_be_written_is_no_traceback(tiny_model: Path, where: str) -> None:
    argv = [sys.executable, "-m", "headway", "generate", str(tiny_model), "--prompt", "the", "--max-tokens", "4"]
    if where == "/dev/full":
        with Path(where).open("wb") as out:
            done = subprocess.run(argv, stdout=out, stderr=subprocess.PIPE, text=True, env=environ(), check=False)
        assert done.stderr == "headway: No space left on device\n"
    else:
        ours, theirs = os.pipe()
        os.close(ours)
        done = subprocess.run(argv, stdout=theirs, stderr=subprocess.PIPE, text=True, env=environ(), check=False)
        os.close(theirs)
        assert done.stderr == ""
    assert done.returncode == 1


def test_an_error_that_no_command_foresaw_names_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Path:
        raise PermissionError(13, "Permission denied", "/locked/model.safetensors")

    monkeypatch.setattr("headway.commands.pull", refuse)
    code, out, err = run(capsys, "pull", "x")
    assert (code, out, err) == (1, "", "headway: '/locked/model.safetensors': Permission denied\n")


def test_doctor_names_a_cache_that_may_not_be_entered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)  # as unreadable as a forbidden directory, also for root
    monkeypatch.setenv("HEADWAY_CACHE", str(loop))
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "set HEADWAY_CACHE" in out
    assert "<- mend this" in out
    code, _, err = run(capsys, "generate", "--prompt", "x")
    assert code == 1
    assert str(loop) in err
    assert "set HEADWAY_CACHE" in err


def test_bench_engine_has_the_contracts_fields(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "bench", "engine", str(tiny_model), "--json", "--kv-memory", "8MB",
        "--batches", "1,2", "--contexts", "16", "--prefills", "64", "--repeats", "1",
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0
    assert set(report) == {
        "model", "kernels", "isa", "threads", "ready_s", "rss_mb", "read_gb_per_s", "decode", "prefill",
    }  # fmt: skip
    assert [(row["batch"], row["context"]) for row in report["decode"]] == [(1, 16), (2, 16)]
    assert all(row["tokens_per_s"] > 0 and row["bandwidth_share"] > 0 for row in report["decode"])
    assert set(report["prefill"][0]) == {"tokens", "tokens_per_s", "peak_share"}


def test_doctor_says_what_was_chosen_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "threads" in out
    assert "affinity mask" in out or "quota" in out
    found = json.loads(run(capsys, "doctor", "--json")[1])
    assert found["threads"] >= 1
    assert found["threads_why"]


def test_cgroup_cpu_one_thread_is_used_and_doctor_says_why(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    for module in ("headway.doctor", "headway.llm"):
        monkeypatch.setattr(f"{module}.usable_threads", lambda: machine.usable_threads(tmp_path, affinity=64))
    _, out, _ = run(capsys, "doctor")
    assert re.search(r"^threads +1  \(a cgroup quota of 1 CPUs .* on 64 CPUs\)$", out, re.MULTILINE)
    with LLM(str(tiny_model), kv_memory="8MB") as llm:
        assert llm.runner.kernels.threads == 1


def test_models_lists_the_aliases(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    code, out, _ = run(capsys, "models", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert "smollm2-135m" in [row["alias"] for row in rows]
    assert not any(row["cached"] for row in rows)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["generate", "no/such/model.gguf", "--prompt", "x"], 1, "no/such/model.gguf"),
        (["generate", "MODEL", "--prompt", "x", "--max-tokens", "0"], 2, "0"),
        (["generate", "MODEL", "--prompt", ""], 2, "empty"),
        (["generate", "MODEL", "--prompt", "x", "--max-tokens", "100000"], 2, "100000"),
        (["generate", "MODEL", "--prompt", "x", "--temperature", "-1"], 2, "temperature is -1"),
        (["generate", "MODEL", "--prompt", "x", "--kernels", "cuda"], 1, "cuda"),
        (["generate", "MODEL", "--prompt", "x", "--kv-memory", "lots"], 2, "lots"),
        (["generate", "MODEL", "--prompt-file", "absent.jsonl"], 2, "'absent.jsonl': No such file"),
        (["eval", "MODEL", "--text-file", "absent.txt"], 2, "absent.txt"),
        (["serve", "MODEL", "--port", "99999"], 2, "99999"),
        (["serve", "MODEL", "--config", "absent.yaml"], 1, "absent.yaml"),
        (["frobnicate"], 2, "frobnicate"),
        (["generate", "", "--prompt", "x"], 1, "name is empty"),
        (["generate", "MODEL", "--prompt", "x", "--threads", "99999"], 2, "99999 is more than 1024"),
        (["bench", "engine", "MODEL", "--contexts", "16,100000"], 2, "--contexts 100000: the model's context is"),
        (["bench", "engine", "MODEL", "--prefills", "100000"], 2, "--prefills 100000"),
        (["bench", "engine", "MODEL", "--batches", "1,x"], 2, "1,x"),
    ],
)
def test_errors_are_one_line_that_names_the_value(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, words: str
) -> None:
    got, out, err = run(capsys, *(str(tiny_model) if part == "MODEL" else part for part in argv))
    assert (got, out) == (code, "")
    assert words in err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if not line.startswith(("usage:", " "))]) == 1


def test_unknown_settings_are_refused_by_name(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "headway.yaml"
    config.write_text("engine: {step_tokenz: 3}\n", encoding="utf-8")
    code, _, err = run(capsys, "serve", str(tiny_model), "--config", str(config))
    assert code == 1
    assert "step_tokenz" in err


def test_nothing_heavy_is_imported_to_parse_a_command() -> None:
    code = "import sys, headway.cli; headway.cli.build_parser(); print('numpy' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ(), check=True)
    assert done.stdout.split() == ["False", "False"]


def test_serving_imports_neither_pytorch_nor_transformers(tiny_model: Path) -> None:
    code = (
        "import sys, headway.serve, headway.engine.worker, headway.llm\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ(), check=True)
    assert done.stdout.strip() == "[]"
    assert os.path.exists(tiny_model)  # noqa: PTH110 - the fixture's model is not touched
