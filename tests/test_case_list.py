"""Every case of ``data/cases.jsonl`` has a test that carries its id in its name, or waits for a room that is not built.

``pytest -k stream_usage`` runs the tests of the case stream-usage.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = {case["id"]: case for case in map(json.loads, (TESTS / "data/cases.jsonl").read_text("utf-8").splitlines())}
NUMERIC: dict[str, object] = json.loads((TESTS / "data/numeric.json").read_text("utf-8"))

NOT_BUILT = {
    "limits-race": "limits",
    "limits-refund": "limits",
    "retry-storm": "upstreams",
    "upstream-529": "upstreams",
    "metrics-renamed": "upstreams",
    "grammar-stall": "structured output",
    "grammar-spec": "structured output",
    "tool-stream": "tool-call parsing",
    "gptq-v1-wrap": "quantized Hugging Face checkpoints",
    "gptq-v1-sym": "quantized Hugging Face checkpoints",
    "awq-order": "quantized Hugging Face checkpoints",
    "ct-offset": "quantized Hugging Face checkpoints",
    "draft-vocab": "speculation",
    "spec-load": "speculation",
    "shorten-rate": "prompt shortening",
    "semantic-negation": "answer cache",
}
"""Cases of rooms that do not exist yet; a case leaves this table with the first test that names it."""


def named_tests() -> set[str]:
    """Return the name of every test function that needs no real weights."""
    names = set()
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        if re.search(r"^pytestmark = .*mark\.model", source, re.MULTILINE):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                tiers = [ast.unparse(each) for each in node.decorator_list]
                if not {"pytest.mark.model", "_real_model"} & {*tiers}:
                    names.add(node.name)
    return names


NAMES = named_tests()


def claims_of(case: str) -> list[str]:
    slug = case.replace("-", "_")
    return sorted(name for name in NAMES if re.search(rf"_{slug}(_|$)", name))


@pytest.mark.parametrize("case", sorted({*CASES, *NUMERIC} - {*NOT_BUILT}))
def test_a_case_has_a_test_of_its_name(case: str) -> None:
    assert claims_of(case), CASES.get(case)


@pytest.mark.parametrize("case", sorted(NOT_BUILT))
def test_a_case_that_is_said_to_wait_has_none(case: str) -> None:
    assert case in CASES or case in NUMERIC
    assert claims_of(case) == []
