"""One request for completions: read, checked, given to the engine, and answered as the text comes."""

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

from common.files import parse_json
from common.settings import UserError, decode, nearest
from inference.server.answer import Answer, usage
from inference.server.engine import Engine
from inference.server.errors import ApiError, Gone, api_error
from inference.server.protocol import CompletionRequest, Limits, text_requests
from inference.server.text import Completion, Piece, TextRequest

_LARGEST_BODY = 2**24  # bytes


@dataclass(frozen=True)
class Served:
    """What is served, and how much of it."""

    name: str
    """Of the model."""
    engine: Engine
    limits: Limits
    hosts: frozenset[str] | None
    """What browsers may call this server; None: anything."""


async def complete(http: Request, served: Served) -> Response:
    """Answer a request for completions, whole or as a stream."""
    request = await read_request(http)
    if request.model is not None:
        check_model(request.model, served)
    _check_number(len(request.prompts) * request.n, served.engine)
    try:
        texts = await run_in_threadpool(text_requests, request, served.engine.tokenizer, served.limits)
    except UserError as error:
        raise ApiError(400, str(error)) from None
    answer = Answer(served.name, served.engine.tokenizer, request.logprobs is not None)
    n_prompt = sum(len(text.prompt_ids) for text in texts[:: request.n])
    pieces = continuations(texts, served.engine, http)
    if not request.stream:
        return JSONResponse(await whole(pieces, len(texts), answer, n_prompt))
    first = await anext(pieces)  # what goes wrong before it still has a status
    events = stream(first, pieces, answer, n_prompt if request.stream_options.include_usage else None)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def read_request(http: Request) -> CompletionRequest:
    """The request that a body holds.

    Raises:
        ApiError: it is too large, or no such request.
        Gone: it never came whole.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # no other site's page can send that here unasked
        raise ApiError(415, f"Content-Type is {kind or 'missing'}: send JSON, with Content-Type: application/json")
    body = bytearray()
    try:
        async for chunk in http.stream():
            body += chunk
            if len(body) > _LARGEST_BODY:
                raise ApiError(413, f"the body is larger than {_LARGEST_BODY:,} bytes: send less at once")
    except ClientDisconnect:
        raise Gone from None
    return await run_in_threadpool(_decoded, bytes(body))


def _decoded(body: bytes) -> CompletionRequest:
    try:
        return decode(CompletionRequest, parse_json(body))
    except UserError as error:
        raise ApiError(400, str(error).replace("config ", "", 1)) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def _check_number(n_texts: int, engine: Engine) -> None:
    if n_texts > engine.max_streams + engine.max_queue:
        raise ApiError(
            400,
            f"prompts times n are {n_texts} texts: this server takes at most "
            f"{engine.max_streams + engine.max_queue} at once",
        )


async def continuations(
    texts: Sequence[TextRequest], engine: Engine, http: Request
) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of these texts as they come, each with its text's number. However it ends, the texts leave the engine.

    Raises:
        ApiError: the engine does not take them, or the model fails.
        Gone: the client has closed the connection.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece | Exception]]()

    def tell(index: int, news: Piece | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(arrived.put_nowait, (index, news))

    completions = [Completion(text, engine.tokenizer, partial(tell, index)) for index, text in enumerate(texts)]
    watch = asyncio.create_task(_watch(http, completions, arrived))
    try:
        engine.submit(completions)
        unfinished = len(completions)
        while unfinished:
            index, news = await arrived.get()
            if isinstance(news, Exception):
                raise news
            unfinished -= news.finish_reason is not None
            yield index, news
    except Gone:
        raise
    except Exception as error:
        raise api_error(error) from error
    finally:
        watch.cancel()
        _leave(completions)


async def _watch(
    http: Request, completions: Sequence[Completion], arrived: asyncio.Queue[tuple[int, Piece | Exception]]
) -> None:
    """Have the texts leave as soon as the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    _leave(completions)
    arrived.put_nowait((0, Gone()))


def _leave(completions: Sequence[Completion]) -> None:
    for completion in completions:
        completion.cancelled = True


async def whole(
    pieces: AsyncIterator[tuple[int, Piece]], n_texts: int, answer: Answer, n_prompt: int
) -> dict[str, Any]:
    """The answer in one."""
    each: list[list[Piece]] = [[] for _ in range(n_texts)]
    async for index, piece in pieces:
        each[index].append(piece)
    choices = [
        answer.choice(
            index,
            "".join(piece.text for piece in those),
            [token for piece in those for token in piece.tokens],
            those[-1].finish_reason,
        )
        for index, those in enumerate(each)
    ]
    return answer.body(choices, usage(n_prompt, sum(those[-1].n_tokens for those in each)))


async def stream(
    first: tuple[int, Piece], pieces: AsyncIterator[tuple[int, Piece]], answer: Answer, n_prompt: int | None
) -> AsyncIterator[str]:
    """The answer as server-sent events; at the end the numbers of tokens, where `n_prompt` is given."""
    n_tokens = 0
    try:
        async for index, piece in _from(first, pieces):
            n_tokens += piece.n_tokens if piece.finish_reason else 0
            yield _event(answer.body([answer.choice(index, piece.text, piece.tokens, piece.finish_reason)]))
        if n_prompt is not None:
            yield _event(answer.body([], usage(n_prompt, n_tokens)))
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status is sent already
        yield _event(error.body)
    except Gone:
        pass


async def _from(first: tuple[int, Piece], others: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[tuple[int, Piece]]:
    yield first
    async for other in others:
        yield other


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


def check_model(name: str, served: Served) -> None:
    """Raise ApiError where another model is asked for than there is."""
    if name != served.name:
        raise ApiError(404, f"the model {name!r} does not exist: {nearest(name, [served.name])}", "model_not_found")
