"""JSON lines on stderr."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from headway.telemetry import log


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level, access = root.handlers[:], root.level, log.ACCESS.level
    stream = io.StringIO()
    log.setup_logging(level=logging.WARNING, stream=stream)
    yield stream
    root.handlers, root.level, log.ACCESS.level = handlers, level, access


def test_an_access_line_is_one_json_object(lines: io.StringIO) -> None:
    log.access(id="r1", status=200, ms=1.5)
    line = json.loads(lines.getvalue())
    assert line["logger"] == "headway.access"
    assert (line["id"], line["status"], line["ms"]) == ("r1", 200, 1.5)


def test_an_exception_stays_on_its_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("headway.x").exception("broke")
    assert lines.getvalue().count("\n") == 1
    assert "ValueError" in json.loads(lines.getvalue())["exception"]
