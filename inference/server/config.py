"""The settings of a server: the model, the address, and limits."""

from pydantic import Field

from inference.load import ModelConfig


class ServeConfig(ModelConfig, defaults="serve"):
    """The settings of scripts/serve.py."""

    host: str
    """Address to listen at; 127.0.0.1: only programs on this machine can reach it."""
    port: int = Field(ge=0, le=65535)
    """0: any free port."""
    max_streams: int = Field(ge=1)
    """Texts written at once, in one batch."""
    max_queue: int = Field(ge=0)
    """Texts that may wait for a place; more are refused with status 429."""
    max_prompt_tokens: int = Field(ge=1)
    """Longest prompt."""
    max_tokens: int = Field(ge=1)
    """Longest continuation."""
    cache_states: int = Field(ge=0)
    """Maximum number of cached states of recent prompts, reused by prompts that start alike; 0: none."""
    cache_bytes: int = Field(ge=0)
    """Most bytes of these states, on the model's device."""
