"""Every error that HybridFlow raises on purpose, as one tree.

```text
HybridFlowError
|-- ConfigError             a configuration value or key that cannot be used        (also a ValueError)
|-- DataError               a data file, a line of it, or a prompt                  (also a ValueError)
|-- TopologyError           sizes that do not divide, a rank or axis that is absent (also a ValueError)
|-- PlanError               a mapping plan that cannot be read, met or found        (also a ValueError)
|-- ProtocolError           a transfer protocol or a registration used wrongly      (also a ValueError)
|-- BatchError              rows or columns of a batch that do not fit              (also a ValueError)
|-- RewardError             a reward function that raised or returned wrong values
|-- BackendError            a training or generation backend that refuses
|   |-- BackendUnavailableError   its library is missing; the message has the line that installs it
|   |-- ModelError                files of a model or tokenizer that cannot be used  (also a ValueError)
|   |-- ReshardError              a weight transfer that is incomplete or does not match
|   |-- StateError                a training state that cannot be written or read
|   `-- NonFiniteLossError        a loss or gradient norm that is NaN or infinite
|-- PoolError               slots that the cluster does not have
`-- WorkerError             a call that failed on a rank
    `-- WorkerTimeoutError  a call, or a start, that passed its deadline
```

A message states the given value, the rule that it breaks and what to do.
"""

from __future__ import annotations

import copyreg
from typing import Any

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "BatchError",
    "ConfigError",
    "DataError",
    "HybridFlowError",
    "ModelError",
    "NonFiniteLossError",
    "PlanError",
    "PoolError",
    "ProtocolError",
    "ReshardError",
    "RewardError",
    "StateError",
    "TopologyError",
    "WorkerError",
    "WorkerTimeoutError",
]


class HybridFlowError(Exception):
    """Root of the tree: catches every error that HybridFlow raises on purpose.

    A notebook shows its message and notes without a traceback; `traceback.print_exception(error)` prints one.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles without the constructor, whose arguments may be others than the message."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython shows of an error that ends a cell."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class ConfigError(HybridFlowError, ValueError):
    """A configuration value or key that cannot be used."""


class DataError(HybridFlowError, ValueError):
    """A data file, one of its lines, or a prompt that cannot be used."""


class TopologyError(HybridFlowError, ValueError):
    """Sizes that do not divide, or a rank or an axis that a topology does not have."""


class PlanError(HybridFlowError, ValueError):
    """A mapping plan that cannot be read, cannot be met, or does not exist."""


class ProtocolError(HybridFlowError, ValueError):
    """A transfer protocol or a registration that is used wrongly."""


class BatchError(HybridFlowError, ValueError):
    """Rows or columns of a batch that do not fit the request."""


class RewardError(HybridFlowError):
    """A reward function that raised, or did not return one finite number per response."""


class BackendError(HybridFlowError):
    """A training or generation backend that cannot do what was requested."""


class BackendUnavailableError(BackendError):
    """A backend whose library is missing; the message has the line that installs it."""


class ModelError(BackendError, ConfigError):
    """Files of a model or a tokenizer that cannot be used: a backend refuses them, and a user configured them."""


class ReshardError(BackendError):
    """A weight transfer whose tensors are missing, extra, mis-shaped or different from their source."""


class StateError(BackendError):
    """A training state whose files cannot be written, or are missing, damaged or another model's."""


class NonFiniteLossError(BackendError):
    """A loss or a gradient norm that is NaN or infinite; the weights are still the last good ones."""


class PoolError(HybridFlowError):
    """Slots that a cluster does not have."""


class WorkerError(HybridFlowError):
    """A call that failed on a rank: an exception there, or the death of its process."""


class WorkerTimeoutError(WorkerError):
    """A call, or a start of workers, that passed its deadline."""
