"""JSON-lines logging to stderr; message content is never logged."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO

import msgspec

_encoder = msgspec.json.Encoder()
ACCESS = logging.getLogger("headway.access")


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON line; ``extra={"fields": {...}}`` adds keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        instant = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{instant}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line.update(fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


def setup_logging(*, level: int = logging.INFO, stream: TextIO | None = None) -> logging.Handler:
    """Send everything to ``stream`` (stderr) as JSON lines; returns the handler, so that it can be removed."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    ACCESS.setLevel(logging.INFO)  # the setting ``server.access_log`` decides, not the level
    return handler


def access(**fields: Any) -> None:
    """Write the one line of a request that has ended: identifiers, numbers and outcomes only."""
    ACCESS.info("request", extra={"fields": fields})
