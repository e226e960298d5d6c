"""The routes: a page at /, OpenAI's API at /v1. Every error has OpenAI's form and a reason."""

import re
from functools import partial
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from common.settings import JsonDict, UserError
from data.tokenizers.chat import ChatTokenizer
from inference.server.completions import Served, answer_completion, check_model
from inference.server.protocol import ChatRequest, CompletionRequest
from inference.server.responses import ApiError

PAGE = Path(__file__).parent / "page"
_SAFE = {  # the page loads nothing from other sites, and other sites cannot embed it
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; "
    "base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_PATHS = (
    "there are POST /v1/completions and /v1/chat/completions, and GET /, /v1/models and /health"
)


def create_app(served: Served) -> FastAPI:
    """Return the application; the caller starts and stops its worker."""

    async def check_host(request: Request) -> None:
        """Refuse names other than this server's. Another site's page in a browser may reach it
        through a host name of that site, which resolves to this machine.
        """
        host = request.headers.get("host", "")
        match = re.fullmatch(r"\[?([^][]*?)\]?(:\d*)?", host)  # an IPv6 address has brackets
        if served.hosts and (match is None or match[1].lower() not in served.hosts):
            names = " or ".join(sorted(served.hosts))
            raise ApiError(403, f"Host {host!r} is not this server's name: use {names}")

    # Every route checks the host; the page answers HEAD too, as monitors ask.
    app = FastAPI(openapi_url=None, dependencies=[Depends(check_host)])
    get = partial(app.api_route, methods=["GET", "HEAD"])

    # Errors, from what a client did wrong to what the server did.
    @app.exception_handler(ApiError)
    @app.exception_handler(UserError)
    async def _refused(_: Request, error: Exception) -> Response:
        return format_error(error if isinstance(error, ApiError) else ApiError(400, str(error)))

    @app.exception_handler(HTTPException)
    async def _no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}: {_PATHS}"
        return format_error(ApiError(error.status_code, message))

    @app.exception_handler(Exception)
    async def _failed(_: Request, error: Exception) -> Response:
        return format_error(ApiError(500, f"the server failed: {type(error).__name__}"))

    @app.exception_handler(ClientDisconnect)
    async def _gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    # The page, and what describes the server.
    @get("/")
    @get("/page.js")
    @get("/page.css")
    async def page(request: Request) -> Response:
        return FileResponse(PAGE / (request.url.path[1:] or "page.html"), headers=_SAFE)

    @get("/health")
    async def health() -> JsonDict:
        writing, waiting = served.worker.load
        return {"status": "ok", "writing": writing, "waiting": waiting}

    @get("/v1/models")
    async def models() -> JsonDict:
        return {"object": "list", "data": [_describe_model(served)]}

    @get("/v1/models/{name:path}")
    async def model(name: str) -> JsonDict:
        check_model(name, served)
        return _describe_model(served)

    # Texts.
    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await answer_completion(http, served, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        return await answer_completion(http, served, ChatRequest)

    return app


def format_error(error: ApiError) -> Response:
    """Return an error as a whole response."""
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body, error.status, headers)


def _describe_model(served: Served) -> JsonDict:
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "log-gpt",
        "max_prompt_tokens": served.limits.max_prompt_tokens,
        "max_tokens": served.limits.max_tokens,
        "max_model_len": served.worker.engine.gpt.config.max_len,
        "chat": isinstance(served.tokenizer, ChatTokenizer),
    }
