"""The documentation speaks of files that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_stop_of_the_path_is_a_file() -> None:
    named = re.findall(r"\| (src/headway/[\w/]+\.py) \|", (ROOT / "docs/path.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_pages_made_from_code_are_current() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts/docs.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_document_names_a_machine_path() -> None:
    wrong = re.compile(r"/(work|root|opt|tmp)/")
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [str(path) for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []


def test_every_command_that_the_readme_names_is_one() -> None:
    from headway.cli import build_parser

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"`headway (serve \|[^`]*)`", readme)
    commands = [name.split()[0] for name in listed.split(" | ")]
    help_text = build_parser().format_help()
    assert all(re.search(rf"^    {name} ", help_text, re.MULTILINE) for name in commands), commands
    assert sorted(commands) == sorted(re.findall(r"^    (\w+) ", help_text, re.MULTILINE))


def test_every_document_that_is_named_exists() -> None:
    named = re.compile(r"\b(?:docs/[\w/-]+\.md|(?:scripts|deploy|benchmarks)/[\w/]+(?:\.\w+)?)\b")
    missing = [
        f"{page.relative_to(ROOT)} names {name}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for name in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_every_benchmark_that_a_table_names_is_one() -> None:
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    named = re.findall(r"python -m (benchmarks\.\w+)", text)
    assert named
    assert [name for name in named if not (ROOT / f"{name.replace('.', '/')}.py").is_file()] == []
