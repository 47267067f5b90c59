"""The error tree: drawn as it is, with the statuses and codes that callers rely on."""

from __future__ import annotations

import inspect
import re

import pytest

from headway import errors
from headway.errors import HeadwayError, error_of

KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, HeadwayError) and kind is not HeadwayError
}
CONTRACT = {
    "InvalidRequest": (400, "invalid_request_error"),
    "Unauthenticated": (401, "invalid_api_key"),
    "PermissionDenied": (403, "permission_denied"),
    "ModelNotFound": (404, "model_not_found"),
    "DeadlineExceeded": (408, "deadline_exceeded"),
    "TooLarge": (413, "request_too_large"),
    "RateLimited": (429, "rate_limit_exceeded"),
    "Overloaded": (503, "server_is_overloaded"),
}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.fullmatch(r"([│├└─ ]+)(\w+) +(?:(\d{3}) +(\w+)|\w.*)", line)
        if found:
            depth = len(found[1]) // 4
            parents[depth - 1 :] = [found[2]]
            above = parents[depth - 2] if depth > 1 else "HeadwayError"
            drawn[found[2]] = (above, found[3] and int(found[3]), found[4])
    real = {
        name: (
            kind.__bases__[0].__name__,
            *((kind.status, kind.code) if drawn.get(name, ("", None))[1] else (None, None)),
        )
        for name, kind in KINDS.items()
    }
    assert drawn == real
    assert all(
        drawn[name][1]
        for name, kind in KINDS.items()
        if "code" in vars(kind) and kind.__base__ is not errors.LocalError
    )


@pytest.mark.parametrize("name", CONTRACT)
def test_statuses_and_codes_are_those_of_the_contract(name: str) -> None:
    assert (KINDS[name].status, KINDS[name].code) == CONTRACT[name]


def test_only_what_cannot_be_had_here_tells_clients_not_to_retry() -> None:
    assert {name for name, kind in KINDS.items() if kind.should_retry is False} == {"DeadlineExceeded", "OutOfReach"}


@pytest.mark.parametrize("name", KINDS)
def test_an_error_crosses_the_process_border_by_its_code(name: str) -> None:
    found = error_of(KINDS[name].code, "why", 1.5)
    assert (found.message, found.retry_after_s, found.code) == ("why", 1.5, KINDS[name].code)
    assert set(found.body()["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_code_is_a_fault_of_ours() -> None:
    assert type(error_of("what is this", "why")).__name__ == "InternalError"
