"""Settings: every mistake is one line with the place, the value and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config import load_config
from headway.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine: {threads: -1}", r"engine\.threads`, not -1"),
        ("engine: {threads: 0}", r"engine\.threads`, not 0"),
        ("engine: {context_tokens: 0}", r"engine\.context_tokens`, not 0"),
        ("engine: {context_tokens: -5}", r"engine\.context_tokens`, not -5"),
        ("engine: {threads: many}", r"engine\.threads`, not 'many'"),
        ("server: {port: 70000}", r"server\.port`, not 70000"),
        ("engin: {}", "engin"),
        ("- a list", "must be a mapping of settings, not list"),
        ("server:\n  port: [", r"not YAML: .*, line 2, column 10"),
        ("server: 'open", r"not YAML: .*, line 1, column \d+"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_its_place_and_value(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "headway.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "headway.yaml"
    path.write_text("engine: {threads: 3, step_tokens: 64}\n", encoding="utf-8")
    engine = load_config(path, {"engine.threads": 1, "engine.kernels": None}).engine
    assert (engine.threads, engine.step_tokens, engine.kernels) == (1, 64, "auto")
