"""How long a caller is ready to wait, read from its headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from headway.config import SLO_CLASSES, SloConfig
from headway.errors import InvalidRequest
from headway.types import Request, Slo

_LONGEST_MS: Final = 7 * 24 * 3600 * 1000.0


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a caller allows; None where it said nothing."""

    total_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    slo_class: str = ""


def read_patience(headers: Mapping[str, str], *, stream: bool, limit_s: float | None) -> Patience:
    """Return the caller's limits; raises InvalidRequest that names the header for a value that is no duration.

    A passed deadline is nonsense, never the most urgent. The official clients' read timeout bounds a plain answer only:
    on a stream it is the time between two reads, which pings keep short.
    """
    total_s = _milliseconds(headers, "x-request-timeout-ms")
    bounds = [bound for bound in (total_s, limit_s, None if stream else _read_timeout(headers)) if bound is not None]
    return Patience(
        total_s=min(bounds) if bounds else None,
        ttft_s=_milliseconds(headers, "x-slo-ttft-ms"),
        tpot_s=_milliseconds(headers, "x-slo-tpot-ms"),
        slo_class=_slo_class(headers),
    )


def promised(request: Request, patience: Patience, config: SloConfig, tenant: str = "") -> Request:
    """Return the request with its tenant, its deadline, and targets of its own or of its class."""
    kind = config.of(patience.slo_class or config.default)
    return msgspec.structs.replace(
        request,
        tenant=tenant,
        deadline=None if patience.total_s is None else request.arrived + patience.total_s,
        priority=request.priority + kind.priority,
        slo=Slo(
            ttft_s=kind.ttft_s if patience.ttft_s is None else patience.ttft_s,
            itl_s=kind.itl_s if patience.tpot_s is None else patience.tpot_s,
            ttft_asked=patience.ttft_s is not None,
            itl_asked=patience.tpot_s is not None,
        ),
    )


def _slo_class(headers: Mapping[str, str]) -> str:
    name = headers.get("x-slo-class", "").strip().lower()
    if name and name not in SLO_CLASSES:
        raise InvalidRequest(
            f"header x-slo-class={name[:40]!r} is not a class of service: it must be one of {', '.join(SLO_CLASSES)}",
            param="x-slo-class",
        )
    return name


def _milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= _LONGEST_MS:
        raise InvalidRequest(
            f"header {name}={text[:40]!r} is not allowed: it must be milliseconds above 0, at most {_LONGEST_MS:.0f}",
            param=name,
        )
    return value / 1000.0


def _read_timeout(headers: Mapping[str, str]) -> float | None:
    """Return the official clients' own timeout; they send it unasked, so a strange value is no one's mistake."""
    try:
        value = float(headers.get("x-stainless-read-timeout", ""))
    except ValueError:
        return None
    return value if 0.0 < value <= _LONGEST_MS / 1000.0 else None
