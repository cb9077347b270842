from __future__ import annotations

import subprocess
import sys

import hf_controller


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, hf_controller; print(sorted({'torch', 'tensordict', 'ray', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_everything_that_is_listed_can_be_imported():
    assert all(hasattr(hf_controller, name) for name in hf_controller.__all__)
    assert set(hf_controller.__all__) <= set(dir(hf_controller))
