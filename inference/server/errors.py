"""What a client is told where there is no answer, in OpenAI's form."""

from typing import Any

from fastapi.responses import JSONResponse, Response

from common.settings import UserError
from inference.server.engine import Full, Stopped


class ApiError(Exception):
    """A request that is not answered as its sender hoped."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        kind = {429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = kind if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}

    def response(self) -> Response:
        """The same as a response of its own."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


class Gone(Exception):
    """Nobody listens to the answer any more."""


def api_error(error: Exception) -> ApiError:
    """What the engine's errors are to a client."""
    if isinstance(error, Full):
        return ApiError(429, str(error), "queue_full")
    if isinstance(error, Stopped):
        return ApiError(503, str(error), "stopping")
    what = str(error) if isinstance(error, UserError) else f"the model failed: {type(error).__name__}"
    return ApiError(500, what, "model_failed")
