"""HTTP errors: a status, a code and one sentence, in the body of each API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooflax.engine.sequence import NOT_FINITE
from rooflax.errors import CheckpointError, EngineError, QueueFull, RequestError, RooflaxError

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 429: "rate_limit_error", 501: "not_implemented_error",
}  # fmt: skip
"""By status; other 4xx are invalid_request_error, other 5xx server_error."""
ANTHROPIC_TYPES = TYPES | {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
ENGINE_FAILED = "The engine failed while answering; the server's log says more under this id."


class ApiError(RooflaxError):
    """An answer other than 200.

    Args:
        message: one sentence.
        status: of HTTP.
        code: what programs compare.
        param: the field at fault, as in `messages[0].role`.
        headers: further ones of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message, param=param)
        self.status, self.code, self.headers = status, code, dict(headers or {})

    @property
    def type(self) -> str:
        """The class of error that clients of OpenAI's API know."""
        return TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )


def as_api_error(error: BaseException) -> ApiError:
    """Any error as what the client is told; of our own faults no more than that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        headers = {"Retry-After": "1"}
        return ApiError(str(error), status=429, code="queue_full", headers=headers)
    if isinstance(error, RequestError | CheckpointError):  # a chat template may be the checkpoint's
        return ApiError(str(error), param=error.param)
    if isinstance(error, TimeoutError):
        return ApiError(
            "The request took longer than it may; ask for fewer tokens.", status=504, code="timeout"
        )
    if isinstance(error, EngineError) and str(error) == NOT_FINITE:
        return ApiError(NOT_FINITE, status=500, code="numerical_error")
    return ApiError(ENGINE_FAILED, status=500, code="engine_error")


def openai_body(error: ApiError) -> dict[str, Any]:
    """The body of an error as OpenAI's clients read it."""
    return {
        "error": {
            "message": str(error), "type": error.type, "param": error.param, "code": error.code,
        }
    }  # fmt: skip


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(error.status, other)
    return {
        "type": "error",
        "error": {"type": kind, "message": str(error)},
        "request_id": request_id,
    }
