"""Fixtures that several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a chat template, in Hugging Face layout."""
    return make_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct, pulled into the cache when absent (tests marked ``model``)."""
    from headway.config import environment
    from headway.models.pull import resolve

    return resolve("smollm2-135m", environment())
