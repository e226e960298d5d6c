"""scripts/serve.py: load a model, and serve it until a signal comes."""

import contextlib
import ipaddress
import signal
import socket
from collections.abc import Iterator

import uvicorn

from common.console import say, warn
from common.settings import UserError
from inference.server.app import create_app
from inference.server.completions import Served
from inference.server.config import ServeConfig
from inference.server.engine import Engine
from inference.server.protocol import Limits
from trainer.checkpoint import load_model, open_model
from trainer.runtime import open_runtime

_SECONDS_FOR_LAST_WORDS = 5


def serve(config: ServeConfig) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        UserError: there is no such checkpoint, or the address cannot be listened at.
    """
    runtime = open_runtime(config.runtime)
    runtime.announce()
    checkpoint = open_model(config.checkpoint)
    gpt, tokenizer = load_model(checkpoint)
    gpt = gpt.to(runtime.device, runtime.dtype).eval()  # without a backward pass, weights may be bfloat16
    engine = Engine(gpt, tokenizer, config.max_streams, config.max_queue)
    limits = Limits(config.max_prompt_tokens, config.max_tokens, gpt.config.max_len)
    name = checkpoint.run_dir.resolve().name
    with listen(config.host, config.port) as listener:
        app = create_app(Served(name, engine, limits, _names(config.host)))
        url = _url(config.host, listener.getsockname()[1])
        say(f"{name} is served at {url} (the page) and {url}/v1 (OpenAI's API); Ctrl-C stops")
        # h11 alone: the same on every machine. Hydra has turned logging off but for errors: no configuration here
        settings = uvicorn.Config(
            app, log_config=None, http="h11", lifespan="off", timeout_graceful_shutdown=_SECONDS_FOR_LAST_WORDS
        )
        engine.start()
        _Server(settings, engine).run(sockets=[listener])
        engine.join()
    say("stopped")


class _Server(uvicorn.Server):
    """Stops its engine first, so that all answers end, and then itself."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but for raising them again at the end: to be stopped is how a server ends well."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell all who wait, then close the connections."""
        self._engine.stop()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; warns where others than this machine's programs can reach it.

    Raises:
        UserError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python puts the address in brackets after it
        raise UserError(
            f"host={host} port={port} cannot be listened at ({reason}): use another port, or "
            f"port=0 for any, and an address of this machine"
        ) from None
    if _names(host) is None:
        warn(f"host={host}: everyone who reaches this machine can use the model; nothing asks for a password")
    return listener


def _names(host: str) -> frozenset[str] | None:
    """What browsers on this machine may call the server; None where it is reached from elsewhere, by any name."""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    return frozenset({"localhost", "127.0.0.1", "::1", host}) if is_local else None


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
