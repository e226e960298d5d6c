"""scripts/serve.py: serve a model until Ctrl-C or SIGTERM."""

import ipaddress
import logging
import socket
import time
from types import FrameType

import uvicorn

from common.console import say, warn
from common.settings import UserError
from inference.engine import Engine, PromptCache
from inference.load import load
from inference.server.app import create_app
from inference.server.completions import Served
from inference.server.protocol import ServeConfig
from inference.server.worker import Worker

_SECONDS_TO_FINISH = 5
_SECONDS_FOR_THE_LAST_TURN = 30.0


def serve_model(config: ServeConfig) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        UserError: there is no such checkpoint, or the address is not available.
    """
    # The model, and the thread that writes texts.
    loaded = load(config)
    gpt = loaded.place(loaded.compute.device, autocast=False)
    tokenizer = loaded.tokenizer
    engine = Engine(
        gpt,
        tokenizer.n_vocab,
        config.max_streams,
        interleave=True,
        cache=PromptCache(config.cache_states, config.cache_bytes),
    )
    worker = Worker(engine, config.max_queue)
    # A line for each request.
    access_log = logging.getLogger("uvicorn.access")
    access_log.setLevel(logging.INFO)
    access_log.addHandler(_Lines())
    name = loaded.checkpoint.run_dir.resolve().name
    # Listen before the model's first turn, so that an address in use is told at once.
    with open_listener(config.host, config.port) as listener:
        served = Served(name, worker, tokenizer, config, _names(config.host))
        app = create_app(served)
        host = f"[{config.host}]" if ":" in config.host else config.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        say(f"{name} is served at {url} (the page) and {url}/v1 (OpenAI's API); Ctrl-C stops")
        # h11, so that every machine uses the same parser; no log_config, because Hydra has
        # configured logging
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=not config.quiet,
            http="h11",
            lifespan="off",
            timeout_graceful_shutdown=_SECONDS_TO_FINISH,
        )
        worker.start()
        _Server(settings, worker).run(sockets=[listener])
        worker.join(_SECONDS_FOR_THE_LAST_TURN)
    say("stopped")


class _Lines(logging.Handler):
    """Prints a line with the time for each request."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{time.strftime('%H:%M:%S')} {record.getMessage()}")


class _Server(uvicorn.Server):
    """Stops its worker first, so that all answers end, and then itself."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second signal stops at once.

        Unlike uvicorn, do not re-raise the signal: a stop is not a failure.
        """
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, then close the connections."""
        self._worker.stop()
        await super().shutdown(sockets)


def open_listener(host: str, port: int) -> socket.socket:
    """Open the listening socket, and warn if other machines can reach it.

    Raises:
        UserError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python adds the address in brackets
        raise UserError(
            f"host={host} port={port} cannot be used ({reason}): host must be an address of this "
            "machine; use another port, or port=0 for any free one"
        ) from None
    if _names(host) is None:
        warn(
            f"host={host}: everyone who can reach this machine can use the model, "
            "without a password"
        )
    return listener


def _names(host: str) -> frozenset[str] | None:
    """Host names that browsers on this machine may use; None: any.

    Any if other machines can reach the server.
    """
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    return frozenset({"localhost", "127.0.0.1", "::1", host}) if is_local else None
