"""Damages files at random and reads them: each reader raises an error of HybridFlow's tree, or shows what is left.

    python integration-tests/fuzz.py --inputs 100000        # `make fuzz`
    python integration-tests/fuzz.py --reader "plan, drawn" --number 4711

An input is named by its reader and its number, and is the same in every run. It may take 5 seconds of CPU time and
1 GB of memory. Inputs that fail are kept in `.cache/fuzz/`.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

from fuzzed_readers import READERS, Fuzzed, write_files
from hf_protocols import HybridFlowError
from mutated_inputs import mutate

__all__ = ["check_inputs"]

MOST_CPU_S = 5.0
MOST_RSS_BYTES = 1 << 30
KEPT = Path(__file__).parents[1] / ".cache" / "fuzz"
_MOST_FINDINGS = 200
_PART = 2000
"""Inputs that a process reads before the program says how far it is."""


class _TooSlowError(BaseException):
    """Not an Exception: no reader may swallow it."""


def check_inputs(numbers: Sequence[int], readers: Sequence[Fuzzed] = READERS) -> list[str]:
    """Reads a damaged file for each number, and returns one text for each that a reader did not take well.

    Args:
        numbers: of inputs; each has the reader that its number draws.
        readers: that are drawn from.
    """
    findings: list[str] = []
    shares = [each.share for each in readers]
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(place)
        write_files(folder)
        healthy = {each.file: (folder / each.file).read_bytes() for each in readers}
        for reader in readers:
            reader.read(folder)  # what is healthy is read, or nothing below means anything
        for number in numbers:
            (reader,) = random.Random(number).choices(readers, shares)
            found = _check_input(reader, number, folder, healthy[reader.file])
            if found is not None and len(findings) < _MOST_FINDINGS:
                findings.append(found)
    return findings


def _check_input(reader: Fuzzed, number: int, folder: Path, healthy: bytes) -> str | None:
    file = folder / reader.file
    kind = reader.kind or file.suffix.removeprefix(".")
    damaged = mutate(healthy, kind, random.Random(f"{reader.name}:{number}"))
    file.write_bytes(damaged)
    try:
        with _limited_time():
            reader.read(folder)
    except HybridFlowError as error:
        problem = _judge_message(error, file.name if reader.names_file else "")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = "".join(traceback.format_exception(error, limit=-4))
    else:
        problem = None
    finally:
        file.write_bytes(healthy)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if problem is None and peak > MOST_RSS_BYTES:
        problem = f"the process has {peak >> 20} MB, more than {MOST_RSS_BYTES >> 20}"
    if problem is None:
        return None
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = KEPT / f"{number}-{file.name}"
    kept.write_bytes(damaged)
    return f"--reader {reader.name!r} --number {number}  ({kept})\n{problem}"


def _judge_message(error: HybridFlowError, file: str) -> str | None:
    """A message is text that a terminal can show, of a length that a person reads, and names the file."""
    text = str(error)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return f"the message has an unpaired surrogate: {text!r}"
    if not text or len(text) > 20_000:
        return f"a message of {len(text)} characters: {text[:200]!r}"
    if file not in text:
        return f"the message does not name {file}: {text[:300]!r}"
    return None


@contextmanager
def _limited_time() -> Iterator[None]:
    """Ends a block that computes for longer than `MOST_CPU_S`; a loaded machine makes no difference."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooSlowError(f"took more than {MOST_CPU_S:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> int:
    """Check all inputs in as many processes as there are cores; 1 if one was not taken well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--reader", help="only this one, by its name")
    parser.add_argument("--number", type=int, help="only this input")
    given = parser.parse_args()
    readers = [each for each in READERS if given.reader in (None, each.name)]
    if not readers:
        parser.error(f"--reader {given.reader!r}: it is none of {', '.join(each.name for each in READERS)}")
    numbers = range(given.first, given.first + given.inputs) if given.number is None else [given.number]
    cores = min(os.cpu_count() or 1, len(numbers))
    if cores == 1 or given.reader:  # a reader's function does not travel to another process
        findings = check_inputs(numbers, readers)
    else:
        num_parts = max(cores, len(numbers) // _PART)
        parts = [numbers[part::num_parts] for part in range(num_parts)]
        findings = []
        with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
            for done, found in enumerate(pool.map(check_inputs, parts), 1):
                findings += found
                sys.stderr.write(f"part {done} of {num_parts}: {len(findings) or 'none'} not taken well\n")
    for each in findings:
        sys.stderr.write(f"{each}\n")
    count = len(findings) or "none"
    sys.stdout.write(f"{len(numbers):,} inputs of {len(readers)} readers: {count} not taken well\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
