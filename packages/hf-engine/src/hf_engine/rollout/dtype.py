"""The dtypes that a rollout engine may compute in, for any training dtype: shards are cast on their way."""

from __future__ import annotations

from typing import Literal, get_args

from hf_protocols.errors import BackendError
from hf_protocols.validation import Checks

__all__ = ["RolloutDtype", "check_dtype"]

_check = Checks(BackendError)

RolloutDtype = Literal["float32", "bfloat16", "float16"]


def check_dtype(dtype: object) -> None:
    """Refuses what no engine computes in.

    Raises:
        BackendError: naming the dtypes that there are.
    """
    _check.one_of("dtype", dtype, get_args(RolloutDtype))
