"""Attention mechanisms: each file has the configuration, the module and the state of one."""

from typing import Annotated, get_args

from pydantic import Field

from model.attention.linear import LinearConfig
from model.attention.log_space import LogSpaceConfig, LogSpaceSignedConfig
from model.attention.longformer import LongformerConfig
from model.attention.projection import ProjectionConfig
from model.attention.softmax import SoftmaxConfig
from model.attention.sparse import FixedConfig, SlidingWindowConfig, StridedConfig

AttentionConfig = Annotated[
    FixedConfig
    | LinearConfig
    | LogSpaceConfig
    | LogSpaceSignedConfig
    | LongformerConfig
    | ProjectionConfig
    | SlidingWindowConfig
    | SoftmaxConfig
    | StridedConfig,
    Field(discriminator="name"),
]
ATTENTION = get_args(get_args(AttentionConfig)[0])
