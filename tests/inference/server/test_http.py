"""scripts/serve.py in a separate process, with a real HTTP client."""

import json
import signal
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


COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


def ask(client, path=COMPLETIONS, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client, path=COMPLETIONS, **body):
    """The objects of all server-sent events; the last must be [DONE]."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=body | options) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *lines, done = filter(None, response.iter_lines())
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def expected(gpt, prompt, n, seed, **sampling):
    """The continuation by the model alone."""
    drawn = drawn_by(gpt, prompt.encode(), n, seed, **sampling)
    return bytes(takewhile(lambda token: token < 256, drawn)).decode(errors="replace")


def drawn_by(gpt, ids, n, seed, **sampling):
    prompts = torch.tensor([[256, *ids]])
    return drawn_without_engine(gpt, prompts, n, gpt.config.n_vocab, SamplingConfig(**sampling), seed)[0].tolist()


def test_a_completion_is_what_the_model_generates_for_each_prompt_and_seed(client, make_gpt):
    sampling = {"temperature": 0.9, "top_k": 50}
    answer = ask(client, prompt=["a", "bc"], n=2, max_tokens=9, seed=5, **sampling)
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", "tiny", "cmpl-")
    gpt = make_gpt(endless=True)
    texts = [expected(gpt, prompt, 9, seed, **sampling) for prompt in ("a", "bc") for seed in (5, 6)]
    assert len(set(texts)) == 4
    same = {"logprobs": None, "finish_reason": "length"}
    assert answer["choices"] == [{"index": index, "text": text} | same for index, text in enumerate(texts)]
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 36, "total_tokens": 39} | details
    one, other = ask(client, prompt=["a", "a"], max_tokens=9)["choices"]
    assert one["text"] != other["text"]


def test_a_conversation_reads_its_beginning_once(client, make_gpt):
    """Every turn has the text of a model that reads all of it, and says what it did not read again."""
    prompt = "A long beginning, all in ASCII. " * 20
    reused = []
    for turn in range(3):
        answer = ask(client, prompt=prompt, max_tokens=12, seed=turn)
        text = answer["choices"][0]["text"]
        assert text == expected(make_gpt(endless=True), prompt, 12, turn)
        assert answer["usage"]["prompt_tokens"] == len(prompt.encode())
        reused.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        prompt += text + "More words of a person. " * 8
    assert reused == [0, 511, 767]  # whole pieces of 256, of which <|endoftext|> is no part of the prompt


def pieces_of(chunks, choice):
    """What a stream says of a choice, which is complete with its last piece alone."""
    pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
    assert len(pieces) > 20
    return pieces


def test_a_stream_says_the_same_in_pieces(client):
    body = {"prompt": "né 日本", "max_tokens": 40, "seed": 3, "n": 2, "logprobs": 2, "echo": True}
    whole = ask(client, **body)
    *chunks, last = streamed(client, **body)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    for choice in whole["choices"]:
        pieces = pieces_of(chunks, choice)
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][key]] == values


def test_tokens_are_placed_in_the_prompt_and_its_continuation(client):
    """By characters of both, whether the prompt is returned or not: as OpenAI's."""
    prompt = "né 日本"
    body = {"prompt": prompt, "max_tokens": 12, "seed": 3, "logprobs": 1}
    (echoed,) = ask(client, **body, echo=True)["choices"]
    (alone,) = ask(client, **body)["choices"]
    assert echoed["text"] == prompt + alone["text"]
    assert alone["logprobs"]["text_offset"] == echoed["logprobs"]["text_offset"][len(prompt.encode()) :]
    assert alone["logprobs"]["text_offset"][0] == len(prompt)


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
]


def test_what_would_change_nothing_is_accepted(client):
    body = {"prompt": "a", "max_tokens": 3, "seed": 1}
    harmless = {"response_format": {"type": "text"}, "tool_choice": "none", "tools": [], "metadata": {"a": "b"}}
    assert ask(client, **body, **harmless)["choices"] == ask(client, **body)["choices"]


@pytest.mark.parametrize(("body", "reason"), BAD)
def test_a_bad_request_is_told_why(client, body, reason):
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert reason in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": None, "code": None}


def test_other_errors_have_that_form_too(client):
    paths = "there are POST /v1/completions and /v1/chat/completions, and GET /, /v1/models"
    for status, response, reason in [
        (404, client.post(COMPLETIONS, json={"model": "tinny"}), "did you mean 'tiny'?"),
        (404, client.get("/v1/models/other"), "the model 'other' does not exist"),
        (400, client.post(CHATS, json={"messages": TALK}), "messages are for chat models, which this is not"),
        (404, client.get("/v1/nothing"), f"Not Found: {paths}"),
        (405, client.get(COMPLETIONS), f"Method Not Allowed: {paths}"),
        (415, client.post(COMPLETIONS, content=b"{}"), "Content-Type is missing: send JSON"),
        (413, client.post(COMPLETIONS, json={"prompt": "x" * 2**24}), "larger than 16,777,216 bytes"),
    ]:
        assert response.status_code == status
        assert reason in response.json()["error"]["message"]


def test_requests_by_another_name_or_from_another_site_are_refused(client):
    for name in ("127.0.0.1", "localhost", "[::1]", "LOCALHOST"):
        assert client.get("/v1/models", headers={"Host": f"{name}:80"}).status_code == 200
    for name in ("evil.example", "[::1", "127.0.0.1.evil.example:80"):
        for path in ("/", "/page.js", "/v1/models"):
            response = client.get(path, headers={"Host": name})
            assert response.status_code == 403
            assert "is not this server's name" in response.json()["error"]["message"]
        assert client.post(COMPLETIONS, json={}, headers={"Host": name}).status_code == 403
        assert client.get("/openapi.json", headers={"Host": name}).status_code == 404
    as_pages_may_send = {"Content-Type": "text/plain"}
    assert client.post(COMPLETIONS, content=b"{}", headers=as_pages_may_send).status_code == 415


def test_the_page_needs_nothing_from_elsewhere(client):
    for path, kind in (("/", "text/html"), ("/page.js", "javascript"), ("/page.css", "text/css")):
        response = client.get(path)
        assert response.status_code == 200
        assert kind in response.headers["content-type"]
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "//" not in response.text.replace("// ", "")
        head = client.head(path)  # as monitors ask
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(response.content))


# Chats


@pytest.fixture(scope="module")
def chat_client(chat_served):
    with httpx.Client(base_url=chat_served.url, timeout=60) as client:
        yield client


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]


def test_an_answer_is_what_the_model_generates_to_the_first_marker(chat_client, chat_gpt):
    sampling = {"seed": 1, "temperature": 2.0, "top_p": 0.99}
    said = ask(chat_client, CHATS, model="talker", messages=TALK, max_completion_tokens=300, **sampling)
    ids = CHAT.encode_chat([("system", "Be brief."), ("user", "2+3?")], answer=True)
    drawn = drawn_by(chat_gpt, ids, 300, **sampling)
    end = next(i + 1 for i, token in enumerate(drawn) if token > 256)
    message = {"role": "assistant", "content": CHAT.decode_bytes(drawn[:end]).decode(errors="replace")}
    assert said["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert (said["object"], said["model"], said["id"][:9]) == ("chat.completion", "talker", "chatcmpl-")
    usage = {"prompt_tokens": len(ids), "completion_tokens": end, "total_tokens": len(ids) + end}
    assert said["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_a_stream_of_a_chat_says_the_same_in_pieces(chat_client):
    body = {"messages": TALK, "max_tokens": 40, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2, "user": "me"}
    whole = ask(chat_client, CHATS, **body)
    *chunks, last = streamed(chat_client, CHATS, **body)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {(chunk["id"], chunk["object"]) for chunk in [*chunks, last]} == {(last["id"], "chat.completion.chunk")}
    for choice in whole["choices"]:
        pieces = pieces_of(chunks, choice)
        content = choice["message"]["content"]
        assert "".join(piece["delta"]["content"] for piece in pieces) == content
        assert [piece["delta"].get("role") for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
        tokens = choice["logprobs"]["content"]
        assert [token for piece in pieces for token in piece["logprobs"]["content"]] == tokens
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode(errors="replace") == content
        for token in tokens:
            likeliest, _ = token["top_logprobs"]
            assert likeliest["logprob"] >= token["logprob"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "messages: Field required"),
        ({"messages": "a"}, 'messages="a": Input should be an array'),
        ({"messages": [*TALK, {"role": "critic"}]}, "messages.2: a message whose role is not system, user"),
        ({"messages": [{"role": "user", "content": "x" * 2001}]}, "messages has 2003 tokens: this server"),
        ({"messages": TALK, "max_completion_tokens": 10**6}, "max_tokens=1000000 is too much"),
        ({"messages": TALK, "prompt": "a"}, "unknown key 'prompt'"),
        ({"messages": TALK, "tools": [{}]}, "tools is not supported: leave it out"),
    ],
)
def test_a_bad_chat_is_told_why(chat_client, body, reason):
    response = chat_client.post(CHATS, json=body)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


def test_an_answer_is_as_long_as_the_positions_allow(make_gpt):
    request = ChatRequest(messages=TALK)
    n_prompt = len(CHAT.encode_chat(request.messages, answer=True))
    for max_len, most in [(None, 4096), (64, 64 - n_prompt), (8, 1)]:
        assert request.as_completion(CHAT, 4096, max_len).max_tokens == most


def open_stream(client, **body):
    """A started stream: the response, and an iterator over the lines after the first."""
    request = client.build_request("POST", COMPLETIONS, json=FOREVER | body | {"stream": True})
    response = client.send(request, stream=True)
    lines = response.iter_lines()
    next(lines)
    return response, lines


def wait_for_load(client, writing, waiting):
    end = time.monotonic() + 60
    while client.get("/health").json() != {"status": "ok", "writing": writing, "waiting": waiting}:
        assert time.monotonic() < end


def test_texts_beyond_the_places_wait_until_others_leave(client):
    streams = [open_stream(client) for _ in range(16)]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, client, max_tokens=1) for _ in range(4)]
        wait_for_load(client, 16, 4)
        full = client.post(COMPLETIONS, json={})
        assert full.status_code == 429
        assert full.headers["retry-after"]
        error = full.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert error["message"].startswith("20 texts are being written or waiting already: try again")
        streams[0][0].close()
        for text in waiting:
            text.result()
    for response, _ in streams:
        response.close()
    wait_for_load(client, 0, 0)


def test_who_no_longer_waits_for_an_answer_leaves(client):
    with pytest.raises(httpx.ReadTimeout):
        client.post(COMPLETIONS, json=FOREVER, timeout=1)
    wait_for_load(client, 0, 0)


@pytest.mark.slow
def test_it_stops_in_the_middle_of_streams_and_tells_everyone(serve):
    """A server that other machines can reach accepts any host name, and warns."""
    server = serve("max_streams=2", "host=0.0.0.0")
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(1) as pool:
        assert client.get("/v1/models", headers={"Host": "machine.example"}).status_code == 200
        streams = [open_stream(client, max_tokens=4096) for _ in range(2)]
        waits = pool.submit(httpx.post, f"{url}{COMPLETIONS}", json={"max_tokens": 4096}, timeout=60)
        wait_for_load(client, 2, 1)
        status, out, err = server.end(signal.SIGINT)
        assert (status, out.splitlines()[-1]) == (0, "stopped")
        (warning,) = err.splitlines()
        assert warning.startswith("warning: host=0.0.0.0: everyone who can reach this machine can use the model")
        for _, lines in streams:
            *_, last = filter(None, lines)
            assert "the server is stopping" in last
        assert waits.result().status_code == 503
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.parametrize(("options", "n_lines"), [((), 2), (("quiet=true",), 0)])
@pytest.mark.slow
def test_a_line_for_each_request_unless_it_is_to_be_quiet(serve, options, n_lines):
    server = serve(*options)
    httpx.get(f"{server.url}/health?key=a%0Ab")
    httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "secret", "max_tokens": -1})
    _, out, _ = server.end()
    logged = [line.partition(" - ")[2] for line in out.splitlines() if " - " in line]
    lines = ['"GET /health?key=a%0Ab HTTP/1.1" 200', '"POST /v1/completions HTTP/1.1" 400']
    assert logged == lines[:n_lines]
    assert "secret" not in out


@pytest.mark.slow
def test_a_server_whose_output_nobody_reads_any_more_answers(serve):
    server = serve()
    server.process.stdout.close()
    assert [httpx.get(f"{server.url}/health").status_code for _ in range(3)] == [200] * 3


@pytest.mark.usefixtures("restored_torch")
def test_what_cannot_be_served_is_one_line(command, served, run_dir):
    port = served.url.rpartition(":")[2]
    for option, reason in [
        (f"port={port}", "cannot be used (Address already in use)"),
        ("host=192.0.2.1", "cannot be used (Cannot assign requested address)"),
        (f"checkpoint={run_dir / 'none'}", "does not exist"),
    ]:
        assert_one_line(command("scripts/serve", f"checkpoint={run_dir}", "runtime.device=cpu", option), reason)
