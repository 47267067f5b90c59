"""Writes the docs that are made from code (docs/cli.md, settings.md, metrics.md); ``--check`` only compares."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
os.environ["COLUMNS"] = "100"

from headway import config  # noqa: E402
from headway.cli import build_parser  # noqa: E402
from headway.telemetry import metrics  # noqa: E402

EXAMPLE = """\
model: smollm2-135m
engine:
  threads: 2
  kv_memory: 2GiB
server:
  port: 9000
  access_log: true
"""
TREE = "```tree\n"
NOTE = "<!-- made by scripts/docs.py; edit the code, then run `make docs` -->\n"


def cli() -> str:
    """Return every command's help."""
    parser = build_parser()
    parts = ["# Commands\n", NOTE, "```text\n" + parser.format_help() + "```\n"]

    def walk(inner: argparse.ArgumentParser) -> None:
        for action in inner._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    parts.append(f"## {sub.prog}\n\n```text\n{sub.format_help()}```\n")
                    walk(sub)

    walk(parser)
    return "\n".join(parts)


def _field_docs(kind: type) -> dict[str, str]:
    """Return the string under each field of a class, joined to one line."""
    tree = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for here, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            found[here.target.id] = text
    return found


def _parts(name: str, made: msgspec.Struct) -> Iterator[tuple[str, type[msgspec.Struct], msgspec.Struct]]:
    """Yield (dotted name, type, defaults) of a part of the settings and of those inside it."""
    yield name, type(made), made
    for field in made.__struct_fields__:
        inner = getattr(made, field)
        if isinstance(inner, msgspec.Struct):
            yield from _parts(f"{name}.{field}" if name else field, inner)


def settings() -> str:
    """Return a table of every setting of headway.yaml and of the environment."""
    lines = [
        "# Settings\n",
        NOTE,
        "`headway.yaml` (given with `--config`) may hold any of these; unknown keys are refused. An example:\n",
        "```yaml\n" + EXAMPLE + "```",
    ]
    for name, kind, made in _parts("", config.Config()):
        lines += [f"\n## {name or 'top level'}\n", "| setting | default | meaning |", "| --- | --- | --- |"]
        docs = _field_docs(kind)
        hints = typing.get_type_hints(kind)
        for field in kind.__struct_fields__:
            default = getattr(made, field)
            if isinstance(default, msgspec.Struct):
                continue  # a part of its own
            choices = typing.get_args(hints[field]) if typing.get_origin(hints[field]) is typing.Literal else ()
            meaning = docs[field] + (f" One of {', '.join(map(str, choices))}." if choices else "")
            lines.append(f"| `{name + '.' if name else ''}{field}` | `{default}` | {meaning} |")
    lines += ["\n## environment\n", "| field | meaning |", "| --- | --- |"]
    lines += [f"| `{field}` | {text} |" for field, text in _field_docs(config.Environment).items()]
    return "\n".join(lines) + "\n"


def tree() -> str:
    """Return the source tree, one line a file: the first sentence of its docstring."""
    lines = ["src/headway/"]
    package = ROOT / "src/headway"
    for folder in [package, *sorted(path for path in package.rglob("*") if path.is_dir())]:
        files = sorted(folder.glob("*.py"))
        if not files:
            continue
        depth = len(folder.relative_to(package).parts)
        if depth:
            lines.append(f"{'  ' * depth}{folder.name}/")
        for file in files:
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            first = " ".join(text.split("\n\n")[0].split()).rstrip(".")
            if len(first) > 96:
                first = re.split(r"[;:.(]", first)[0].strip()
            name = f"{'  ' * (depth + 1)}{file.name}"
            lines.append(f"{name:28} {first}")
    return "\n".join(lines) + "\n"


def readme() -> str:
    """Return README.md with the tree put in its place."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(TREE, 1)
    return before + TREE + tree() + "```" + rest.split("```", 1)[1]


def main() -> int:
    """Write or compare all pages; return 1 when one is stale."""
    check = "--check" in sys.argv[1:]
    pages = {
        "docs/cli.md": cli(),
        "docs/settings.md": settings(),
        "docs/metrics.md": metrics.render_docs(),
        "README.md": readme(),
    }
    stale = []
    for name, text in pages.items():
        path = ROOT / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"{', '.join(stale)}: not what the code says; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
