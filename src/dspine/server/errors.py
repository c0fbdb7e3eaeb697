"""Every error of the server in OpenAI's shape, with the right status."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from dspine.errors import CapacityError, DspineError, UsageError
from dspine.server.engine_thread import BusyError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    503: "unavailable_error",
}


class RequestError(Exception):
    """A request that cannot be served. `param` names the field at fault, `facts` are more entries
    of the error.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, **facts: str | int
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.facts = facts


def error_body(
    status: int, message: str, param: str | None = None, **facts: str | int
) -> dict[str, Any]:
    """OpenAI's and llama-server's shape in one: `code` is the status."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"code": status, "message": message, "type": kind, "param": param, **facts}}


def error_response(
    status: int, message: str, param: str | None = None, **facts: str | int
) -> JSONResponse:
    """The reply; what is unavailable now may be there in a second."""
    headers = {"Retry-After": "1"} if status == 503 else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(status, message, param, **facts), status, headers)


def response_of(error: BaseException) -> JSONResponse:
    """The reply to a request that ended with this error."""
    status, message, param = describe(error)
    facts = error.facts if isinstance(error, RequestError) else {}
    return error_response(status, message, param, **facts)


def describe(error: BaseException) -> tuple[int, str, str | None]:
    """Status, sentence and field of any error; what nobody expected tells no details."""
    if isinstance(error, RequestError):
        return error.status, str(error), error.param
    if isinstance(error, ValidationError):
        return 400, *_first_fault(error)
    if isinstance(error, BusyError):
        return 503, str(error), None
    if isinstance(error, UsageError | CapacityError):
        return 400, str(error), None
    if isinstance(error, DspineError):
        return 500, "the server could not make this answer: see its log", None
    return 500, "something went wrong inside the server: see its log", None


def _first_fault(error: ValidationError) -> tuple[str, str | None]:
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = ".".join(str(part) for part in fault["loc"])
    said = fault["msg"].removeprefix("Value error, ")
    more = error.error_count() - 1
    also = f" (and {more} more)" if more else ""
    return f"{path or 'the body'}: {said}{also}", path or None
