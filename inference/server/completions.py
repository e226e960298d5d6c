"""Answers one request for completions: reads and checks it, submits its texts, and sends them as they grow."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from common.console import print_error
from common.files import parse_json
from common.settings import UserError, decode, nearest
from data.tokenizer import Tokenizer
from inference.completion import Completion, News, Piece, Progress, TextRequest, joined
from inference.reading import TextMemory
from inference.server.answer import Answer, ApiError
from inference.server.config import ServeConfig
from inference.server.protocol import CompletionRequest, text_requests
from inference.server.worker import Worker

_LARGEST_BODY = 2**24  # bytes


@dataclass(frozen=True)
class Served:
    """A served model."""

    name: str
    worker: Worker
    tokenizer: Tokenizer
    limits: ServeConfig
    max_len: int | None
    """The model's learned positions; None: no limit."""
    memory: TextMemory
    hosts: frozenset[str] | None
    """Host names that browsers may use for this server; None: any."""


async def complete(http: Request, served: Served) -> Response:
    """Answer a request for completions, whole or as a stream."""
    request = await read_request(http)
    if request.model is not None:
        check_model(request.model, served)
    n_texts, most = len(request.prompt) * request.n, served.worker.max_texts
    if n_texts > most:
        raise ApiError(400, f"prompts times n are {n_texts} texts: this server takes at most {most} at once")
    try:
        texts = await run_in_threadpool(_texts, request, served)
    except UserError as error:
        raise ApiError(400, str(error)) from None
    answer = Answer(served.name, served.tokenizer, texts, request.n)
    pieces = continuations(texts, served, http)
    if not request.stream:
        return JSONResponse(await whole(pieces, len(texts), answer))
    first = await anext(pieces)  # an error before it still has a status
    events = stream(first, pieces, answer, request.stream_options.include_usage)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _texts(request: CompletionRequest, served: Served) -> list[TextRequest]:
    texts = text_requests(request, served.tokenizer, served.limits, served.max_len)
    served.memory.check(max(text.n_read for text in texts))
    return texts


async def read_request(http: Request) -> CompletionRequest:
    """Read and decode a request's body.

    Raises:
        ApiError: the body is too large, or not a valid request.
        ClientDisconnect: the client closed the connection before sending all of it.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers do not let other sites' pages send it
        raise ApiError(415, f"Content-Type is {kind or 'missing'}: send JSON, with Content-Type: application/json")
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > _LARGEST_BODY:
            raise ApiError(413, f"the body is larger than {_LARGEST_BODY:,} bytes: send less at once")
    return await run_in_threadpool(_decoded, bytes(body))


def _decoded(body: bytes) -> CompletionRequest:
    try:
        return decode(CompletionRequest, parse_json(body))
    except UserError as error:
        raise ApiError(400, str(error).replace("config ", "", 1)) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


async def continuations(
    texts: Sequence[TextRequest], served: Served, http: Request
) -> AsyncIterator[tuple[int, Piece | Progress]]:
    """Yield news of these texts as they come, each with its text's index. In the end the texts leave the engine.

    Raises:
        ApiError: there is no place for the texts, or the model fails.
        ClientDisconnect: the client has closed the connection.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[int, News]]()

    def tell(index: int, news: News) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits for this
            loop.call_soon_threadsafe(arrived.put_nowait, (index, news))

    completions = [Completion(text, served.tokenizer, partial(tell, index)) for index, text in enumerate(texts)]
    watch = asyncio.create_task(_watch(http, completions, arrived))
    try:
        served.worker.submit(completions)
        unfinished = len(completions)
        while unfinished:
            index, news = await arrived.get()
            if isinstance(news, Exception):
                raise news
            unfinished -= isinstance(news, Piece) and news.finish_reason is not None
            yield index, news
    except (ApiError, ClientDisconnect):
        raise
    except Exception as error:
        print_error(f"{type(error).__name__}: {error}")
        what = str(error) if isinstance(error, UserError) else f"the model failed: {type(error).__name__}"
        raise ApiError(500, what, "model_failed") from error
    finally:
        watch.cancel()
        _leave(completions)


async def _watch(http: Request, completions: Sequence[Completion], arrived: asyncio.Queue[tuple[int, News]]) -> None:
    """Cancel the texts as soon as the client closes the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    _leave(completions)
    arrived.put_nowait((0, ClientDisconnect()))


def _leave(completions: Sequence[Completion]) -> None:
    for completion in completions:
        completion.cancelled = True


async def whole(pieces: AsyncIterator[tuple[int, Piece | Progress]], n_texts: int, answer: Answer) -> dict[str, Any]:
    """The whole answer as one object."""
    each: list[list[Piece]] = [[] for _ in range(n_texts)]
    async for index, piece in pieces:
        if isinstance(piece, Piece):
            each[index].append(piece)
    return answer.body(list(enumerate(map(joined, each))), usage=True)


async def stream(
    first: tuple[int, Piece | Progress],
    pieces: AsyncIterator[tuple[int, Piece | Progress]],
    answer: Answer,
    include_usage: bool,
) -> AsyncIterator[str]:
    """The answer as server-sent events; the token counts come last, if they are asked for. Progress is a comment."""
    item: tuple[int, Piece | Progress] | None = first
    try:
        while item:
            index, news = item
            if isinstance(news, Piece):
                yield _event(answer.body([(index, news)]))
            else:
                yield f": {news.n_read} of {news.n_prompt} prompt tokens read\n\n"
            item = await anext(pieces, None)
        if include_usage:
            yield _event(answer.body([], usage=True))
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status has been sent
        yield _event(error.body)
    except ClientDisconnect:
        pass


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


def check_model(name: str, served: Served) -> None:
    """Raise ApiError if the request asks for another model."""
    if name != served.name:
        raise ApiError(404, f"the model {name!r} does not exist: {nearest(name, [served.name])}", "model_not_found")
