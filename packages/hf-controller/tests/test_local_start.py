from __future__ import annotations

import os
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest

from hf_controller import check_local_start, choose_store_bytes, list_local_checks, local_start
from hf_protocols import ConfigError, read_machine_limits

Usage = namedtuple("Usage", ("total", "used", "free"))


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A home and a temporary folder that are good, and no limits."""
    for name in ("RAY_TMPDIR", "TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(local_start, "read_machine_limits", partial(read_machine_limits, tmp_path / "machine"))


@pytest.fixture
def limits(tmp_path):
    def limit(threads="unlimited", files="unlimited"):
        folder = tmp_path / "machine" / "proc" / "self"
        folder.mkdir(parents=True)
        (folder / "limits").write_text(f"Max processes {threads} {threads} processes\nMax open files 9 {files} files\n")
        (folder / "status").write_text("Uid:\t1000\t1000\t1000\t1000\nThreads:\t10\n")

    return limit


def refusal(num_ranks=1):
    with pytest.raises(ConfigError, match="a local Ray cluster cannot start here: ") as caught:
        check_local_start(num_ranks)
    return str(caught.value)


def test_local_start_is_allowed_on_a_good_machine(tmp_path):
    before = sorted(tmp_path.rglob("*"))
    check_local_start(64)
    assert not any(check.is_fatal for check in list_local_checks())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_local_start_refuses_a_long_temporary_folder(tmp_path, monkeypatch, variable):
    session = f"/ray/session_2026-11-25_03-48-44_300321_{os.getpid()}/sockets/plasma_store"
    room = 107 - len(session)
    fits = "/tmp/" + "a" * (room - 5)
    monkeypatch.setenv(variable, fits)
    check_local_start()
    monkeypatch.setenv(variable, f"{fits}a")
    text = refusal()
    assert f"{variable}='/tmp/aaa" in text
    assert f"{room + 1} bytes long, Ray's sockets leave at most {room}. Set RAY_TMPDIR to a shorter folder" in text
    monkeypatch.setenv(variable, "/tmp/" + "\u00e4" * (room // 2 - 1))  # two bytes each
    assert "bytes long" in refusal()


def test_local_start_takes_ray_tmpdir_before_tmpdir(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    check_local_start()
    monkeypatch.setenv("RAY_TMPDIR", "")  # as good as none
    assert "TMPDIR='/proc'" in refusal()


@pytest.mark.parametrize("where", ["", "ray", "absent/deeper"])
def test_local_start_refuses_a_file_as_temporary_folder(tmp_path, monkeypatch, where):
    shallow = tmp_path.parent.parent / f"t{os.getpid()}"
    shallow.mkdir()
    try:
        (shallow / "file").write_text("")
        (shallow / "ray").write_text("")
        given = {"": shallow / "file", "ray": shallow, "absent/deeper": shallow / "file" / "deeper"}[where]
        monkeypatch.setenv("RAY_TMPDIR", str(given))
        text = refusal()
        assert f"RAY_TMPDIR='{given}'" in text
        assert "is not a folder. Set RAY_TMPDIR to a folder of yours" in text
    finally:
        shutil.rmtree(shallow)


def test_local_start_refuses_a_closed_temporary_folder(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc")  # closed to every user
    text = refusal()
    assert "TMPDIR='/proc': Ray keeps its sockets and logs there, and /proc cannot be written to: No such" in text


@pytest.mark.parametrize(("given", "meant"), [("~/t", "{home}/t"), ("t", "{cwd}/t")])
def test_local_start_makes_the_temporary_folder_a_whole_path(monkeypatch, given, meant):
    monkeypatch.setenv("RAY_TMPDIR", given)
    assert local_start.find_temp_dir() == (meant.format(home=os.environ["HOME"], cwd=os.getcwd()), "RAY_TMPDIR")


def test_local_start_needs_a_home_for_its_token(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/proc")
    assert "HOME='/proc': Ray keeps its token there, and /proc cannot be written to" in refusal()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    check_local_start()
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    check_local_start()


def test_local_start_takes_a_token_that_is_there(tmp_path, monkeypatch):
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.mkdir(parents=True)
    assert f"{token} cannot be read: Is a directory" in refusal()
    token.rmdir()
    token.write_text("word")
    monkeypatch.setattr(local_start.tempfile, "TemporaryDirectory", None)  # nothing is tried in the home
    assert local_start._check_home().remedy == ""


def test_local_start_refuses_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert "HOME: not set, and this user has no home" in refusal()


@pytest.mark.parametrize(("threads", "num_ranks", "is_enough"), [(150, 1, False), (220, 1, True), (220, 4, False)])
def test_local_start_counts_threads(limits, threads, num_ranks, is_enough):
    limits(threads=threads)
    if is_enough:
        check_local_start(num_ranks)
    else:
        text = refusal(num_ranks)
        assert f"threads: {threads} more of {threads} may start here, Ray and {num_ranks} rank" in text
        assert "Raise ulimit -u" in text


@pytest.mark.parametrize(("files", "is_enough"), [(40, False), (64, True)])
def test_local_start_counts_open_files(limits, files, is_enough):
    limits(files=files)
    if is_enough:
        check_local_start()
    else:
        assert "open files: at most 40 of each process, a process of Ray opens about 56. Raise ulimit -n" in refusal()


def test_local_start_goes_on_with_little_shared_memory(monkeypatch):
    monkeypatch.setattr(local_start.shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    check_local_start()
    (check,) = [check for check in list_local_checks() if check.name == "/dev/shm"]
    assert "--shm-size=2g" in check.remedy


GIB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Sets the memory of the machine, the limit of its container and free shared memory, in GiB."""

    def describe(*, memory, shm, container=None):
        root = tmp_path / "machine"
        for folder in ("proc/self", "groups"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        kilobytes = int(memory * GIB) // 1024
        (root / "proc/meminfo").write_text(f"MemTotal: {kilobytes} kB\nMemAvailable: {kilobytes} kB\n")
        if container is not None:
            (root / "proc/self/cgroup").write_text("0::/\n")
            (root / "proc/self/mountinfo").write_text("1 1 0:1 / /groups rw - cgroup2 cgroup rw\n")
            (root / "groups/memory.max").write_text(f"{int(container * GIB)}\n")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(int(shm * GIB), 0, int(shm * GIB)))

    return describe


@pytest.mark.parametrize(
    ("memory", "container", "shm", "store"),
    [
        (20, None, 32, 6),
        (20, 10, 32, 3),  # docker run --memory=10g
        (20, None, 4, 3.8),
        (20, None, 0.0625, 0.5),  # Docker's shared memory: the store is in a file
        (1, None, 0.0625, 0.3),
        (0.125, None, 1, 75 / 1024),
        (1024, None, 1024, 200e9 / GIB),
    ],
)
def test_store_bytes_are_a_share_of_what_is_there(machine, memory, container, shm, store):
    machine(memory=memory, container=container, shm=shm)
    assert choose_store_bytes() == pytest.approx(store * GIB, abs=1)


def test_store_bytes_agree_with_the_system_itself(monkeypatch):
    """Memory as the C library has it, and the files of all control groups above this process."""
    monkeypatch.setattr(local_start, "read_machine_limits", read_machine_limits)
    memory = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        top = "/sys/fs/cgroup" + ("/memory" if "memory" in controllers.split(",") else "")
        for group in (Path(top + path), *Path(top + path).parents):
            for name in ("memory.max", "memory.limit_in_bytes"):
                limit = group / name
                if limit.is_file() and limit.read_text().strip().isdecimal():
                    memory.append(int(limit.read_text()))
    found = os.statvfs("/dev/shm")
    free = found.f_bavail * found.f_frsize
    expected = max(min(0.3 * min(memory), max(0.95 * free, 2**29), 200e9), 75 * 2**20)
    assert choose_store_bytes() == pytest.approx(expected, rel=0.02)  # others write to shared memory meanwhile


@pytest.mark.parametrize("value", [0, -1, True, 1e9, "1g", (75 << 20) - 1])
def test_store_bytes_refuse_what_is_not_a_size(value):
    with pytest.raises(ConfigError, match=r"^the_key=.* must be a whole number of at least 78643200$"):
        choose_store_bytes(value, key="the_key")


def test_store_bytes_refuse_more_than_there_is(machine):
    machine(memory=8, shm=2)
    assert choose_store_bytes(2 * GIB) == 2 * GIB
    with pytest.raises(
        ConfigError, match=r"^object_store_bytes=2147483649: /dev/shm has 2147483648 bytes free\. Lower"
    ):
        choose_store_bytes(2 * GIB + 1)
    with pytest.raises(ConfigError, match=r"^object_store_bytes=8589934593: this machine has 8589934592 bytes of mem"):
        choose_store_bytes(8 * GIB + 1)
    machine(memory=8, shm=0.0625)
    assert choose_store_bytes(GIB // 2) == GIB // 2
    with pytest.raises(ConfigError, match=r"give a container a larger --shm-size$"):
        choose_store_bytes(GIB // 2 + 1)
