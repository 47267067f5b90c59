"""What a start measures is kept for the next one, and never stands in its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config import EngineConfig
from headway.engine.calibration import Calibration
from headway.engine.cost import CostModel, Shape
from headway.engine.runner import Runner, load_runner
from headway.models.checkpoint import open_checkpoint
from headway.telemetry.clock import MonotonicClock


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> Runner:
    return load_runner(open_checkpoint(tiny_model), EngineConfig(kernels="reference", block_tokens=16), n_blocks=40)


def calibration(runner: Runner, model: Path, folder: Path, kind: str = "bf16") -> Calibration:
    return Calibration(runner, MonotonicClock(), model, folder, threads=1, kind=kind)


def test_the_first_start_measures_and_the_next_takes_over(runner: Runner, tiny_model: Path, tmp_path: Path) -> None:
    cost, kept = calibration(runner, tiny_model, tmp_path / "cost").model()
    assert not kept
    assert cost.step_s(Shape(1, 1, 16)) > 0.0
    again, kept = calibration(runner, tiny_model, tmp_path / "cost").model()
    assert kept
    assert again.terms == cost.terms
    assert 0.25 <= again.pace <= 4.0
    assert calibration(runner, tiny_model, tmp_path / "cost", kind="int8").model()[1] is False


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"terms": []}', b'{"terms": [1, 2]}', b'{"terms": ["x"]}', b"\xff\x00"]
)
def test_a_broken_file_is_measured_again(runner: Runner, tiny_model: Path, tmp_path: Path, content: bytes) -> None:
    first = calibration(runner, tiny_model, tmp_path)
    first.keep(CostModel())
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert first.model()[1] is False
    assert first.model()[1] is True


def test_values_that_no_machine_has_are_not_taken_over(runner: Runner, tiny_model: Path, tmp_path: Path) -> None:
    first = calibration(runner, tiny_model, tmp_path)
    cost = CostModel()
    cost.terms[0] = -1.0
    first.keep(cost)
    assert first.model()[1] is False


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(runner: Runner, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cost, kept = calibration(runner, tiny_model, tmp_path / "file" / "cost").model()
    assert not kept
    assert cost.step_s(Shape(1, 1, 16)) > 0.0


def test_only_the_newest_files_are_kept(runner: Runner, tiny_model: Path, tmp_path: Path) -> None:
    for i in range(80):
        calibration(runner, tiny_model, tmp_path, kind=str(i)).keep(CostModel())
    assert len(list(tmp_path.iterdir())) == 64
    assert calibration(runner, tiny_model, tmp_path, kind="79").model()[1] is True
