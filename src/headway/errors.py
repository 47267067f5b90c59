"""The error tree; whose fault it is, and the HTTP answer, are decided here once.

HeadwayError
├── ClientError                    the caller can mend it
│   ├── InvalidRequest        400  invalid_request_error
│   │   ├── ContextExceeded   400  context_length_exceeded
│   │   └── NeverFits         400  exceeds_kv_capacity
│   ├── Unauthenticated       401  invalid_api_key
│   ├── PermissionDenied      403  permission_denied
│   ├── ModelNotFound         404  model_not_found
│   ├── NotFound              404  not_found
│   ├── MethodNotAllowed      405  method_not_allowed
│   ├── BodyTimeout           408  request_timeout
│   ├── DeadlineExceeded      408  deadline_exceeded
│   ├── TooLarge              413  request_too_large
│   ├── HeadersTooLarge       431  headers_too_large
│   └── RateLimited           429  rate_limit_exceeded
├── ServerError                    the service is at fault
│   ├── Overloaded            503  server_is_overloaded
│   │   └── OutOfReach        503  target_out_of_reach
│   ├── EngineDied            500  engine_died
│   ├── RequestTimeout        504  request_timeout
│   └── InternalError         500  internal_error
└── LocalError                     never crosses HTTP: a command's error
    ├── CheckpointError            a model file is wrong
    ├── TemplateError              a chat template is wrong or hostile
    ├── ConfigError                a setting is wrong
    └── PullError                  a model could not be had
"""

from __future__ import annotations

from typing import Any, ClassVar


class HeadwayError(Exception):
    """An error with a message for a person: it names the value and the way out."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"
    """The wire's ``type``."""
    should_retry: ClassVar[bool | None] = None
    """Sent as ``x-should-retry`` when not None: the official clients obey it."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the OpenAI error shape."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class ClientError(HeadwayError):
    """The caller can mend it."""

    status = 400
    kind = "invalid_request_error"


class InvalidRequest(ClientError):
    """A malformed body or a bad parameter."""

    code = "invalid_request_error"


class ContextExceeded(InvalidRequest):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class NeverFits(InvalidRequest):
    """Prompt and answer do not fit all of the KV cache."""

    code = "exceeds_kv_capacity"


class Unauthenticated(ClientError):
    """No key, or a bad one."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class PermissionDenied(ClientError):
    """The caller may not do this."""

    status = 403
    code = "permission_denied"
    kind = "permission_error"


class ModelNotFound(ClientError):
    """No such model is served here."""

    status = 404
    code = "model_not_found"


class NotFound(ClientError):
    """No such path or object."""

    status = 404
    code = "not_found"


class MethodNotAllowed(ClientError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class BodyTimeout(ClientError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


class DeadlineExceeded(ClientError):
    """The deadline passed before the work was dispatched."""

    status = 408
    code = "deadline_exceeded"
    should_retry = False


class TooLarge(ClientError):
    """The body is larger than the limit."""

    status = 413
    code = "request_too_large"


class HeadersTooLarge(ClientError):
    """The request line and the headers are larger than the limit."""

    status = 431
    code = "headers_too_large"


class RateLimited(ClientError):
    """The caller's rate is used up."""

    status = 429
    code = "rate_limit_exceeded"
    kind = "rate_limit_error"


class ServerError(HeadwayError):
    """The service is at fault."""


class Overloaded(ServerError):
    """The service is full or draining; ``retry_after_s`` says when to come back."""

    status = 503
    code = "server_is_overloaded"


class OutOfReach(Overloaded):
    """The target that the caller asked for could not be met here with nothing else to do."""

    code = "target_out_of_reach"
    should_retry = False


class EngineDied(ServerError):
    """The engine process ended while it held the request."""

    status = 500
    code = "engine_died"


class RequestTimeout(ServerError):
    """The request's time was up while it ran."""

    status = 504
    code = "request_timeout"


class LocalError(HeadwayError):
    """A command's error; never crosses HTTP."""


class CheckpointError(LocalError):
    """A model file is truncated, hostile or of an unknown kind."""

    code = "bad_checkpoint"


class TemplateError(LocalError):
    """A chat template is wrong, hostile or too slow."""

    code = "bad_template"


class ConfigError(LocalError):
    """A setting is wrong."""

    code = "bad_config"


class PullError(LocalError):
    """A model could not be had."""

    code = "pull_failed"


class InternalError(ServerError):
    """A fault of ours; the log has the details."""


def _by_code() -> dict[str, type[HeadwayError]]:
    found: dict[str, type[HeadwayError]] = {}
    todo: list[type[HeadwayError]] = [HeadwayError]
    while todo:
        kind = todo.pop()
        found[kind.code] = kind
        todo += kind.__subclasses__()
    # Codes that two classes share: over a process border the server's fault is meant.
    found["request_timeout"] = RequestTimeout
    found["internal_error"] = InternalError
    return found


_KINDS = _by_code()


def error_of(code: str, message: str, retry_after_s: float | None = None) -> HeadwayError:
    """Return the error that a code from another process stands for; unknown codes become InternalError."""
    return _KINDS.get(code, InternalError)(message, retry_after_s=retry_after_s)
