"""Compiled kernels: float32 activations in and out, weights as the checkpoint stores them.

Every result depends only on its own inputs: 16 lanes summed in one fixed order, whatever the number of rows,
the tile, the thread or the position. Importing this package prepares Numba's code cache; `setup` comes before
the first call, on the calling thread, and `warm` compiles or loads what a model needs.
"""

from coli_server.engine.kernels.runtime import prepare_environment, setup

prepare_environment()  # before Numba is imported below

from coli_server.engine.kernels.attention import attend, attention, kv_layout  # noqa: E402
from coli_server.engine.kernels.experts import (  # noqa: E402
    ACTIVATION_CLAMPED_SWIGLU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_SILU,
    ExpertShape,
    experts_ffn,
)
from coli_server.engine.kernels.formats import ITEM_BYTES, STORED_AS, Kind, row_bytes  # noqa: E402
from coli_server.engine.kernels.heads import HeadShape, split_heads  # noqa: E402
from coli_server.engine.kernels.linear import linear, linear_heads  # noqa: E402
from coli_server.engine.kernels.norms import (  # noqa: E402
    add_rms_norm,
    combine,
    layer_norm,
    rms_norm,
    silu_mul,
)
from coli_server.engine.kernels.rotary import rope  # noqa: E402
from coli_server.engine.kernels.rounded import check_bfloat16_dots  # noqa: E402
from coli_server.engine.kernels.warming import warm  # noqa: E402

__all__ = [
    "ACTIVATION_CLAMPED_SWIGLU",
    "ACTIVATION_GELU_TANH",
    "ACTIVATION_SILU",
    "ITEM_BYTES",
    "STORED_AS",
    "ExpertShape",
    "HeadShape",
    "Kind",
    "add_rms_norm",
    "attend",
    "attention",
    "check_bfloat16_dots",
    "combine",
    "experts_ffn",
    "kv_layout",
    "layer_norm",
    "linear",
    "linear_heads",
    "rms_norm",
    "rope",
    "row_bytes",
    "setup",
    "silu_mul",
    "split_heads",
    "warm",
]
