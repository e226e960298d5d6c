"""Attention mechanisms, one file each: its configuration, its module, its state."""

from typing import Annotated, get_args

from pydantic import Field

from model.attention.log_space import LogSpaceConfig, LogSpaceSignedConfig
from model.attention.softmax import SoftmaxConfig

AttentionConfig = Annotated[LogSpaceConfig | LogSpaceSignedConfig | SoftmaxConfig, Field(discriminator="name")]
ATTENTION = get_args(get_args(AttentionConfig)[0])
