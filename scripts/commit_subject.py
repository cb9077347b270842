"""Check the form of commit subjects: `area: verb object`, at most 72 characters.

    scripts/commit_subject.py FILE    the message in FILE, as a commit-msg hook
    scripts/commit_subject.py         all commits after the one that scripts/commits-from names; merges are left out

Prints one line for each subject that breaks the form and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FROM = ROOT / "scripts" / "commits-from"
LONGEST = 72
FORM = re.compile(r"[a-z][\w.-]*(, [a-z][\w.-]*)*: \S.*[^.\s]")


def find_fault(subject: str) -> str | None:
    """Returns the rule that a subject breaks, or None."""
    if len(subject) > LONGEST:
        return f"has {len(subject)} characters, at most {LONGEST} are allowed"
    if not FORM.fullmatch(subject):
        return "is not of the form `area: verb object` without a full stop"
    return None


def list_subjects() -> list[str] | None:
    """Returns the subjects after the recorded commit; None where git or that commit is absent, as in an archive."""
    command = ["git", "log", "--no-merges", "--format=%s", f"{FROM.read_text().strip()}..HEAD"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return None if listing.returncode else listing.stdout.splitlines()


def main(arguments: Sequence[str]) -> int:
    """Prints the faults of one message, or of all commits since the recorded one."""
    subjects = [Path(each).read_text().partition("\n")[0] for each in arguments] or list_subjects() or []
    faults = [f"{subject!r} {fault}" for subject in subjects if (fault := find_fault(subject))]
    print("\n".join(faults), end="\n" * bool(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
