"""The documentation speaks of files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_stop_of_the_path_is_a_file() -> None:
    named = re.findall(r"\| (src/headway/[\w/]+\.py) \|", (ROOT / "docs/path.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_readme_tree_names_every_source_file_and_no_other() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.split("```text tree\n", 1)[1].split("```", 1)[0]
    named: set[str] = set()
    folder = ""
    for line in tree.splitlines():
        name = line.strip().split("  ", 1)[0].strip()
        if name.endswith("/"):
            folder = name
        elif name:
            named.add(folder + name)
    real = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src/headway").rglob("*.py")
        if path.name != "__init__.py" or path.stat().st_size > 200
    }
    assert named == real


def test_no_document_names_a_machine_path() -> None:
    wrong = re.compile(r"/(work|root|opt|tmp)/")
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [str(path) for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []
