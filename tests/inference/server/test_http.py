"""scripts/serve.py in a separate process, with a real HTTP client."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import pytest
import torch
from printed import assert_one_line
from texts import CHAT, drawn_without_engine

from inference.sampling import SamplingConfig

pytest.importorskip("fastapi", reason="the server's packages are not installed: pip install -e '.[serve]'")

from inference.server.protocol import ChatRequest

httpx = pytest.importorskip("httpx", reason="httpx is not installed: pip install -e '.[dev]'")
FOREVER = {"max_tokens": 100_000, "temperature": 0}


@pytest.fixture(scope="module")
def client(served):
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def complete(client, **body):
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(lines):
    """The objects of server-sent events, as they come; the last must be [DONE]."""
    for line in lines:
        if line:
            assert line.startswith("data: ")
            if line == "data: [DONE]":
                return
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("no [DONE]")


def streamed(client, path="/v1/completions", **body):
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response.iter_lines()))


def expected(gpt, prompt, n, seed=None, **sampling):
    """The continuation by the model alone."""
    drawn = drawn_by(gpt, [*prompt.encode()], n, seed, **sampling)
    return bytes(takewhile(lambda token: token < 256, drawn)).decode(errors="replace")


def drawn_by(gpt, ids, n, seed=None, **sampling):
    prompts = torch.tensor([[256, *ids]])
    return drawn_without_engine(gpt, prompts, n, gpt.config.n_vocab, SamplingConfig(**sampling), seed or 0)[0].tolist()


def test_a_completion_is_what_the_model_generates(client, make_gpt):
    answer = complete(client, prompt="one, two", max_tokens=12, seed=7, temperature=0.9, top_k=50)
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", "tiny", "cmpl-")
    choice = answer["choices"][0]
    assert choice["text"] == expected(make_gpt(endless=True), "one, two", 12, seed=7, temperature=0.9, top_k=50)
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 12, "total_tokens": 20} | details


def test_a_conversation_reads_its_beginning_once(client, make_gpt):
    """Every turn has the text of a model that reads all of it, and says what it did not read again."""
    prompt, reused = "A long beginning, all in ASCII. " * 20, []
    for turn in range(3):
        answer = complete(client, prompt=prompt, max_tokens=12, seed=turn, n=2, temperature=0.9)
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [expected(make_gpt(endless=True), prompt, 12, turn + i, temperature=0.9) for i in range(2)]
        assert answer["usage"]["prompt_tokens"] == len(prompt.encode())
        reused.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        prompt += texts[0] + "More words of a person. " * 8
    assert reused == [0, 511, 767]  # whole pieces of 256, of which <|endoftext|> is no part of the prompt


def test_every_choice_has_its_prompt_and_its_seed(client, make_gpt):
    answer = complete(client, prompt=["a", "bc"], n=2, max_tokens=9, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [expected(make_gpt(endless=True), prompt, 9, seed) for prompt in ("a", "bc") for seed in (5, 6)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert len(set(texts)) == 4
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 36
    one, other = complete(client, prompt=["a", "a"], max_tokens=9)["choices"]
    assert one["text"] != other["text"]


def test_a_stream_says_the_same_in_pieces(client):
    body = {"prompt": "né 日本", "max_tokens": 40, "seed": 3, "n": 2, "logprobs": 2, "echo": True}
    whole = complete(client, **body)
    *chunks, last = streamed(client, **body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert len(chunks) > 40
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    for choice in whole["choices"]:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        for key, values in choice["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][key]] == values


def test_tokens_are_placed_in_the_prompt_and_its_continuation(client):
    """By characters of both, whether the prompt is returned or not: as OpenAI's."""
    body = {"prompt": "né 日本", "max_tokens": 12, "seed": 3, "logprobs": 1}
    echoed = complete(client, **body, echo=True)["choices"][0]
    alone = complete(client, **body)["choices"][0]
    n_prompt = len("né 日本".encode())  # its tokens are bytes
    assert echoed["text"] == "né 日本" + alone["text"]
    assert alone["logprobs"]["text_offset"] == echoed["logprobs"]["text_offset"][n_prompt:]
    assert alone["logprobs"]["text_offset"][0] == len("né 日本")
    pieces = [choice["logprobs"] for chunk in streamed(client, **body) for choice in chunk["choices"]]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == alone["logprobs"]["text_offset"]


BAD = [
    ({"prompt": 5}, "prompt=5: give a text"),
    ({"prompt": [97, 257]}, "token id 257: this model's are 0 to 256"),
    ({"prompt": "x" * 2001}, "prompt has 2001 tokens: this server takes at most 2000"),
    ({"max_tokens": 100_001}, "max_tokens=100001 is too much: this server gives at most 100000"),
    ({"max_tokens": "9"}, 'max_tokens="9": Input should be a valid integer'),
    ({"n": 21}, "n=21 for each of 1 prompt are 21 texts: this server takes at most 20 at once"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported: leave it"),
    ({"stop": ["a", ""]}, "1 to 256 characters"),
    ({"max_token": 3}, "unknown key 'max_token': did you mean 'max_tokens'?"),
    ({"presence_penalty": 0.5}, "presence_penalty is not supported: leave it"),
    ([], "not a JSON object"),
    (b"{", "not JSON"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b"[" * 65 + b"]" * 65, "levels deep"),
]


def test_what_would_change_nothing_is_accepted(client):
    body = {"prompt": "a", "max_tokens": 3, "seed": 1}
    harmless = {"response_format": {"type": "text"}, "tool_choice": "none", "tools": [], "metadata": {"a": "b"}}
    assert complete(client, **body, **harmless)["choices"] == complete(client, **body)["choices"]


@pytest.mark.parametrize(("body", "reason"), BAD)
def test_a_bad_request_is_told_why(client, body, reason):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert reason in error["message"]
    assert error == {"message": error["message"], "type": "invalid_request_error", "param": None, "code": None}


def test_other_errors_have_that_form_too(client):
    def check(status, response, reason):
        assert response.status_code == status
        assert reason in response.json()["error"]["message"]

    check(404, client.post("/v1/completions", json={"model": "tinny"}), "did you mean 'tiny'?")
    check(404, client.get("/v1/models/other"), "the model 'other' does not exist")
    chat = client.post("/v1/chat/completions", json={"messages": TALK})
    check(400, chat, "messages are for chat models, which this is not: /v1/completions continues a prompt")
    paths = "there are POST /v1/completions and /v1/chat/completions, and GET /, /v1/models"
    check(404, client.get("/v1/nothing"), f"Not Found: {paths}")
    check(405, client.get("/v1/completions"), f"Method Not Allowed: {paths}")
    check(415, client.post("/v1/completions", content=b"{}"), "Content-Type is missing: send JSON")
    check(413, client.post("/v1/completions", json={"prompt": "x" * 2**24}), "larger than 16,777,216 bytes")


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/models/tiny", "/page.css"])
def test_head_is_get_without_a_body(client, path):
    """Monitors and load balancers ask so."""
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.headers["content-length"] == str(len(get.content))


def test_requests_by_another_name_or_from_another_site_are_refused(client):
    for name in ("127.0.0.1", "localhost", "[::1]", "LOCALHOST"):
        assert client.get("/v1/models", headers={"Host": f"{name}:80"}).status_code == 200
    for name in ("evil.example", "[::1", "127.0.0.1.evil.example:80"):
        for path in ("/", "/page.js", "/v1/models", "/openapi.json", "/nothing"):
            response = client.get(path, headers={"Host": name})
            assert response.status_code == 403
            assert "is not this server's name" in response.json()["error"]["message"]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):  # what pages may send
        assert client.post("/v1/completions", content=b"{}", headers={"Content-Type": kind}).status_code == 415


def test_the_page_needs_nothing_from_elsewhere(client):
    for path, kind in (("/", "text/html"), ("/page.js", "javascript"), ("/page.css", "text/css")):
        response = client.get(path)
        assert response.status_code == 200
        assert kind in response.headers["content-type"]
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "//" not in response.text.replace("// ", "")


# Chats


@pytest.fixture(scope="module")
def chat_client(chat_served):
    with httpx.Client(base_url=chat_served.url, timeout=60) as client:
        yield client


CHATS = "/v1/chat/completions"
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]


def answer(client, **body):
    response = client.post(CHATS, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_is_what_the_model_generates_to_the_first_marker(chat_client, chat_gpt):
    seed, sampling = 1, {"temperature": 2.0, "top_p": 0.99}
    said = answer(chat_client, model="talker", messages=TALK, max_completion_tokens=300, seed=seed, **sampling)
    ids = CHAT.encode_chat([("system", "Be brief."), ("user", "2+3?")], answer=True)
    drawn = drawn_by(chat_gpt, ids, 300, seed, **sampling)
    end = next(i + 1 for i, token in enumerate(drawn) if token > 256)
    message = {"role": "assistant", "content": CHAT.decode_bytes(drawn[:end]).decode(errors="replace")}
    assert said["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert (said["object"], said["model"], said["id"][:9]) == ("chat.completion", "talker", "chatcmpl-")
    usage = {"prompt_tokens": len(ids), "completion_tokens": end, "total_tokens": len(ids) + end}
    assert said["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_a_stream_of_a_chat_says_the_same_in_pieces(chat_client):
    body = {"messages": TALK, "max_tokens": 40, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2, "user": "me"}
    whole = answer(chat_client, **body)
    *chunks, last = streamed(
        chat_client, CHATS, **body, stream_options={"include_usage": True, "include_obfuscation": False}
    )
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {(chunk["id"], chunk["object"]) for chunk in [*chunks, last]} == {(last["id"], "chat.completion.chunk")}
    for choice in whole["choices"]:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece["delta"]["content"] for piece in pieces) == choice["message"]["content"]
        assert [piece["delta"].get("role") for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        tokens = choice["logprobs"]["content"]
        assert [token for piece in pieces for token in piece["logprobs"]["content"]] == tokens
        raw = b"".join(bytes(token["bytes"]) for token in tokens)
        assert raw.decode(errors="replace") == choice["message"]["content"]
        assert all(len(token["top_logprobs"]) == 2 for token in tokens)
        assert all(token["top_logprobs"][0]["logprob"] >= token["logprob"] for token in tokens)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "messages: Field required"),
        ({"messages": "a"}, 'messages="a": Input should be an array'),
        ({"messages": [*TALK, {"role": "critic"}]}, "messages.2: a message whose role is not system, user"),
        ({"messages": [{"role": "user", "content": "x" * 2001}]}, "messages has 2003 tokens: this server"),
        ({"max_completion_tokens": 10**6}, "max_tokens=1000000 is too much"),
        ({"prompt": "a"}, "unknown key 'prompt'"),
        ({"tools": [{}]}, "tools is not supported: leave it out"),
    ],
)
def test_a_bad_chat_is_told_why(chat_client, body, reason):
    response = chat_client.post(CHATS, json=({"messages": TALK} if body.keys() - {"messages"} else {}) | body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"


def test_an_answer_is_as_long_as_the_positions_allow(make_gpt):
    request = ChatRequest(messages=TALK)
    for max_len, most in [(None, 4096), (64, 64 - len(CHAT.encode_chat(request.messages, answer=True))), (8, 1)]:
        assert request.as_completion(CHAT, 4096, max_len).max_tokens == most


def open_stream(client, **body):
    """A started stream: the response, and an iterator over the lines after the first."""
    request = client.build_request("POST", "/v1/completions", json=FOREVER | body | {"stream": True})
    response = client.send(request, stream=True)
    assert response.status_code == 200, response.read()
    lines = response.iter_lines()
    next(lines)
    return response, lines


def ask_and_listen_not(url, **body):
    """The connection of a client that has sent a request without streaming and may disconnect."""
    address, content = httpx.URL(url), json.dumps(FOREVER | body).encode()
    connection = socket.create_connection((address.host, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return connection


def wait_for_load(client, writing, waiting, seconds=60):
    end, load = time.monotonic() + seconds, None
    while load != {"status": "ok", "writing": writing, "waiting": waiting}:
        assert time.monotonic() < end, load
        load = client.get("/health").json()


def test_texts_beyond_the_places_wait_and_who_leaves_makes_room(client, served):
    """16 texts are written, 4 wait, the next is refused; every client that disconnects makes room for another text."""
    streams = [open_stream(client, prompt="s") for _ in range(15)]
    connections = [ask_and_listen_not(served.url) for _ in range(4)]
    wait_for_load(client, 16, 3)
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(httpx.post, f"{served.url}/v1/completions", json={}, timeout=60)
        wait_for_load(client, 16, 4)
        full = client.post("/v1/completions", json={})
        assert full.status_code == 429
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert full.json()["error"]["message"].startswith("20 texts are being written or waiting already: try again")
        assert full.headers["retry-after"]
        connections.pop().close()  # it waited
        wait_for_load(client, 16, 3)
        assert not last.done()
        connections.pop(0).close()  # it was written: the first that waits is next
        wait_for_load(client, 16, 2)
        for response, _ in streams[:2]:
            response.close()
        assert last.result().status_code == 200
    for other in (*(response for response, _ in streams), *connections):
        other.close()
    wait_for_load(client, 0, 0)


@pytest.mark.slow
def test_it_stops_in_the_middle_of_streams_and_tells_everyone(serve):
    """A server that other machines can reach accepts any host name, and warns."""
    server = serve("max_streams=2", "host=0.0.0.0")
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(1) as pool:
        assert client.get("/v1/models", headers={"Host": "machine.example"}).status_code == 200
        streams = [open_stream(client, max_tokens=4096) for _ in range(2)]
        waits = pool.submit(httpx.post, f"{url}/v1/completions", json={"max_tokens": 4096}, timeout=60)
        wait_for_load(client, 2, 1)
        status, out, err = server.end(signal.SIGINT)
        assert (status, out.splitlines()[-1]) == (0, "stopped")
        assert err.startswith("warning: host=0.0.0.0: everyone who can reach this machine can use the model")
        assert err.count("\n") == 1
        for _, lines in streams:
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping"
        assert waits.result().status_code == 503
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.parametrize(("options", "n_lines"), [((), 2), (("quiet=true",), 0)])
@pytest.mark.slow
def test_a_line_for_each_request_unless_it_is_to_be_quiet(serve, options, n_lines):
    server = serve(*options)
    httpx.get(f"{server.url}/health?key=a%0Ab")
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "secret", "max_tokens": -1})
    status, out, err = server.end()
    *_, last = lines = out.splitlines()
    logged = [line.partition(" - ")[2] for line in lines if " - " in line]
    said = ['"GET /health?key=a%0Ab HTTP/1.1" 200', '"POST /v1/completions HTTP/1.1" 400']
    assert (status, last, err, logged) == (0, "stopped", "", said[:n_lines])
    assert "secret" not in out


@pytest.mark.slow
def test_a_server_whose_output_nobody_reads_any_more_answers(serve):
    server = serve()
    server.process.stdout.close()
    assert [httpx.get(f"{server.url}/health").status_code for _ in range(3)] == [200] * 3


@pytest.mark.usefixtures("restored_torch")
def test_what_cannot_be_served_is_one_line(command, served, run_dir):
    port = served.url.rpartition(":")[2]
    for options, reason in [
        ([f"checkpoint={run_dir}", f"port={port}", "runtime.device=cpu"], "cannot be used (Address already in use)"),
        ([f"checkpoint={run_dir}", "host=192.0.2.1"], "cannot be used (Cannot assign requested address)"),
        ([f"checkpoint={run_dir / 'none'}", "runtime.device=cpu"], "does not exist"),
    ]:
        assert_one_line(command("scripts/serve", *options), reason)
