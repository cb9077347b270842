"""The executors' conformance suite: what a program may rely on, wherever its calls run.

```python
from hf_controller.testing import StageWorker, conformance_checks

with MyExecutor() as executor, StageWorker(executor) as stage:
    for check in conformance_checks(collectives=False):
        check(stage)
```

What must not live here: tests of one executor. A check is a function of a `StageWorker`; it raises AssertionError where
the executor differs. Checks that need collectives between ranks come last: an executor that runs ranks one after
another leaves them out.
"""

from __future__ import annotations

from hf_controller.testing._checks import conformance_checks
from hf_controller.testing._workers import ProbeWorker, SoloWorker, StageWorker

__all__ = ["ProbeWorker", "SoloWorker", "StageWorker", "conformance_checks"]
