from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import EntryPoint

import pytest

import hf_engine.backends.registry as registry
from hf_engine import (
    available_rollout_backends,
    available_train_backends,
    load_rollout_backend,
    load_train_backend,
)
from hf_protocols import BackendError, BackendUnavailableError


class Distribution:
    name = "hf-other"
    requires = ("numpy>=1", 'no-such-library>=2.1,<3; extra == "other"')


def entry_point(value, name="other", distribution=Distribution):
    found = EntryPoint(name, value, "hf_engine.train_backends")
    vars(found).update(dist=distribution)
    return found


@pytest.fixture
def installed(monkeypatch):
    points = []
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry._load.cache_clear()
    yield points
    registry._load.cache_clear()


def test_the_backends_of_this_package_are_entry_points():
    assert "fsdp" in available_train_backends()
    assert "transformers" in available_rollout_backends()
    assert load_train_backend("fsdp").__name__ == "FsdpBackend"
    assert load_rollout_backend("transformers").__name__ == "TransformersBackend"


def test_an_unknown_name_lists_the_installed_ones(installed):
    installed.extend([entry_point("a:B", "zebra"), entry_point("a:B", "ant")])
    with pytest.raises(BackendError, match=r"no training backend is named 'fdsp'\. Installed are ant, zebra"):
        load_train_backend("fdsp")


@pytest.mark.parametrize("name", [["vllm"], None, ""])
def test_what_is_not_a_name_is_refused(name):
    with pytest.raises(BackendError, match=r"the training backend=.*. Use a name"):
        load_train_backend(name)
    with pytest.raises(BackendError, match=r"the rollout backend=.*. Use a name"):
        load_rollout_backend(name)


def test_the_error_of_a_missing_library_has_the_install_command(installed, tmp_path, monkeypatch):
    (tmp_path / "backend_of_another.py").write_text("import no_such_library.engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed.append(entry_point("backend_of_another:Backend"))
    with pytest.raises(BackendUnavailableError) as error:
        load_train_backend("other")
    assert "needs no_such_library" in str(error.value)
    assert 'pip install "no-such-library>=2.1,<3"' in str(error.value)


def test_the_error_of_a_wrong_version_has_the_install_command(installed, tmp_path, monkeypatch):
    (tmp_path / "no_such_library.py").write_text("")
    (tmp_path / "backend_of_another.py").write_text("from no_such_library import engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed.append(entry_point("backend_of_another:Backend"))
    with pytest.raises(BackendUnavailableError) as error:
        load_train_backend("other")
    assert "needs no_such_library, and not the version that is installed (cannot import name 'eng" in str(error.value)
    assert str(error.value).endswith('pip install "no-such-library>=2.1,<3"')


def test_a_shared_library_that_does_not_load_is_not_a_version(installed, tmp_path, monkeypatch):
    (tmp_path / "broken_library").mkdir()
    (tmp_path / "broken_library" / f"_core{EXTENSION_SUFFIXES[0]}").write_text("no library")
    (tmp_path / "backend_of_a_third.py").write_text("import broken_library._core\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed.append(entry_point("backend_of_a_third:Backend"))
    with pytest.raises(ImportError, match=r"_core.*: file too short|_core.*: invalid ELF header"):
        load_train_backend("other")


def test_a_missing_backend_module_is_not_blamed_on_a_library(installed):
    installed.append(entry_point("no_module_of_this_name:Backend"))
    with pytest.raises(ModuleNotFoundError):
        load_train_backend("other")


def test_two_claims_to_one_name_are_refused(installed):
    installed.extend([entry_point("os:sep"), entry_point("sys:path", distribution=None)])
    with pytest.raises(BackendError, match="claimed by os:sep of hf-other, sys:path of an unknown distribution"):
        load_train_backend("other")


def test_one_backend_listed_twice_is_one_backend(installed):
    installed.extend([entry_point("collections:OrderedDict"), entry_point("collections:OrderedDict")])
    assert load_train_backend("other").__name__ == "OrderedDict"
