"""Attention mechanisms, one file each: its configuration, its module, its state."""

from typing import Annotated

from pydantic import Field

from model.attention.log_space import LogSpaceConfig
from model.attention.softmax import SoftmaxConfig

ATTENTION = (LogSpaceConfig, SoftmaxConfig)
AttentionConfig = Annotated[LogSpaceConfig | SoftmaxConfig, Field(discriminator="name")]
