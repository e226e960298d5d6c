"""Answers one request for completions: reads it, submits its generations, sends their updates."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import NamedTuple

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from common.console import count, print_error
from common.files import parse_json
from common.settings import JsonDict, UserError, decode, suggest_name
from data.tokenizers.build import Tokenizer
from data.tokenizers.chat import ChatTokenizer
from inference.generation import Generation, Update
from inference.server.protocol import ChatRequest, CompletionRequest, ServeConfig, list_requests
from inference.server.responses import ApiError, ChatResponse, CompletionResponse
from inference.server.worker import Worker

_LARGEST_BODY = 2**24  # bytes

AnyRequest = CompletionRequest | ChatRequest
Updates = AsyncIterator[tuple[int, Update]]
"""What is new in the generations of a request, each with its generation's index."""


class Served(NamedTuple):
    """A served model."""

    name: str
    worker: Worker
    tokenizer: Tokenizer
    limits: ServeConfig
    hosts: frozenset[str] | None
    """Host names that browsers may use for this server; None: any."""


async def answer_completion(http: Request, served: Served, kind: type[AnyRequest]) -> Response:
    """Answer a request for completions or for the answer of a chat, whole or as a stream."""
    request = await read_request(http, kind)
    if request.model is not None:
        check_model(request.model, served)
    generations = await run_in_threadpool(_list_generations, request, served)
    respond = ChatResponse if kind is ChatRequest else CompletionResponse
    response = respond(served.name, generations, served.tokenizer, request.n)
    updates = listen_to(generations, served, http)
    if not request.stream:
        async for _ in updates:
            pass
        return JSONResponse(response.whole())
    first = await anext(updates)  # an error before it still has a status
    events = stream_events(first, updates, response, request.stream_options.include_usage)
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _list_generations(request: AnyRequest, served: Served) -> list[Generation]:
    tokenizer = served.tokenizer
    engine = served.worker.engine
    key = "prompt"
    if isinstance(request, ChatRequest):
        if not isinstance(tokenizer, ChatTokenizer):
            raise UserError(
                "messages are for chat models, which this is not: /v1/completions continues a "
                "prompt, and train.py experiment=chat makes a model that answers"
            )
        key = "messages"
        request = request.as_completion(
            tokenizer, served.limits.max_tokens, engine.gpt.config.max_len
        )
    n_texts = len(request.prompt) * request.n
    max_texts = served.worker.max_texts
    if n_texts > max_texts:
        raise UserError(
            f"n={request.n} for each of {count(len(request.prompt), 'prompt')} are {n_texts} "
            f"texts: this server takes at most {max_texts} at once"
        )
    requests = list_requests(request, tokenizer, served.limits, key)
    try:
        for text in requests:
            engine.check_length(text)
    except UserError as error:
        raise ApiError(400, str(error), "context_length_exceeded") from None
    return [Generation(text, tokenizer) for text in requests]


async def read_request(http: Request, kind: type[AnyRequest]) -> AnyRequest:
    """Read and decode a request's body.

    Raises:
        ApiError: the body is too large, or not JSON by its type.
        UserError: it is not a valid request.
        ClientDisconnect: the client closed the connection before sending all of it.
    """
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # browsers do not let other sites' pages send it
        raise ApiError(
            415,
            f"Content-Type is {content_type or 'missing'}: send JSON, with Content-Type: "
            "application/json",
        )
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > _LARGEST_BODY:
            raise ApiError(
                413, f"the body is larger than {_LARGEST_BODY:,} bytes: send less at once"
            )
    return await run_in_threadpool(_decode_body, bytes(body), kind)


def _decode_body(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    try:
        return decode(kind, parse_json(body), json.dumps)
    except ValueError as error:
        problem = "" if isinstance(error, UserError) else "the body is not JSON: "
        message = str(error).replace("config ", "", 1).replace("a valid list", "an array")
        message = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", message)
        raise UserError(problem + message) from None


async def listen_to(generations: Sequence[Generation], served: Served, http: Request) -> Updates:
    """Submit generations and yield their updates. At the end, remove them from the engine.

    Raises:
        ApiError: there is no place for them, or the model fails.
        ClientDisconnect: the client has closed the connection.
    """
    loop = asyncio.get_running_loop()
    arrived = asyncio.Queue[tuple[int, Update | Exception]]()

    def tell(index: int, update: Update | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits for this
            loop.call_soon_threadsafe(arrived.put_nowait, (index, update))

    def leave() -> None:
        for generation in generations:
            generation.cancelled = True

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        leave()
        arrived.put_nowait((0, ClientDisconnect()))

    # Updates come from the engine's thread, and the end of the connection from the client.
    for index, generation in enumerate(generations):
        generation.tell = partial(tell, index)
    watching = asyncio.create_task(watch())
    try:
        served.worker.submit(generations)
        # Pass updates on until every text has ended.
        unfinished = len(generations)
        while unfinished:
            index, update = await arrived.get()
            if isinstance(update, Exception):
                raise update
            if update.finish_reason is not None:
                unfinished -= 1
            yield index, update
    except (ApiError, ClientDisconnect):
        raise
    except Exception as error:  # of the model: the log has the reason
        print_error(f"{type(error).__name__}: {error}")
        message = f"the model failed: {type(error).__name__}"
        if isinstance(error, UserError):
            message = str(error)
        raise ApiError(500, message, "model_failed") from error
    finally:
        watching.cancel()
        leave()


async def stream_events(
    first: tuple[int, Update], updates: Updates, response: CompletionResponse, include_usage: bool
) -> AsyncIterator[str]:
    """Yield the response as server-sent events. `include_usage`: the token counts come last."""
    try:
        yield _format_event(response.chunk(*first))
        async for index, update in updates:
            yield _format_event(response.chunk(index, update))
        if include_usage:
            yield _format_event(response.usage())
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status has been sent
        yield _format_event(error.body)
    except ClientDisconnect:
        pass


def _format_event(value: JsonDict) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


def check_model(name: str, served: Served) -> None:
    """Raise ApiError if the request asks for another model."""
    if name != served.name:
        message = f"the model {name!r} does not exist: {suggest_name(name, [served.name])}"
        raise ApiError(404, message, "model_not_found")
