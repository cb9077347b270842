from __future__ import annotations

import os
import subprocess

import pytest

from engine_testing.forked_programs import ForkedProgram, run_forked


@pytest.mark.parametrize(
    ("text", "code", "errors"),
    [
        ("print('said', *sys.argv[1:], os.environ['OWN'], os.getcwd())", 0, ""),
        ("import atexit; atexit.register(print, 'said a b own', os.getcwd())", 0, ""),
        ("print('said a b own', os.getcwd()); sys.exit(3)", 3, ""),
        ("print('said a b own', os.getcwd()); raise KeyError('lost')", 1, "KeyError: 'lost'"),
        ("print('said a b own', os.getcwd()); import neighbour; neighbour.fail()", 1, "KeyError: 'neighbour'"),
    ],
)
def test_a_program_ends_as_python_would_end_it(tmp_path, text, code, errors):
    program, folder = tmp_path / "program.py", tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "neighbour.py").write_text("def fail():\n    raise KeyError('neighbour')\n")
    program.write_text(f"import os, sys\nif __name__ == '__main__':\n    {text}\n")
    ended = run_forked(program, ["a", "b"], folder=folder, environment={"OWN": "own"})
    assert (ended.returncode, ended.stdout) == (code, f"said a b own {folder}\n"), ended.stderr
    assert errors in ended.stderr and bool(ended.stderr) == bool(errors)
    assert "OWN" not in os.environ


def test_a_program_that_does_not_end_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import time\nprint('on', flush=True)\ntime.sleep(600)\n")
    running = ForkedProgram(program)
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(timeout_s=0.5)
    assert not running._process.is_alive()
