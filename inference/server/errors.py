"""Errors as clients receive them, in OpenAI's form."""

from typing import Any

from fastapi.responses import JSONResponse, Response

from common.console import errors
from common.settings import UserError
from inference.server.worker import Full, Stopped


class ApiError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """The object to send."""
        kind = {429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = kind if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}

    def response(self) -> Response:
        """The whole response."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


def api_error(error: Exception) -> ApiError:
    """The response to an error of the engine; an unexpected one is also printed."""
    if isinstance(error, Full):
        return ApiError(429, str(error), "queue_full")
    if isinstance(error, Stopped):
        return ApiError(503, str(error), "stopping")
    errors.print(f"error: {type(error).__name__}: {error}", markup=False, style="red")
    what = str(error) if isinstance(error, UserError) else f"the model failed: {type(error).__name__}"
    return ApiError(500, what, "model_failed")
