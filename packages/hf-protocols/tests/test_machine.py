from __future__ import annotations

import os

import pytest

from hf_protocols import read_machine_limits

GIB = 1 << 30
MACHINE = {
    "proc/meminfo": "MemTotal:       67108864 kB\nMemFree:  1 kB\nMemAvailable:   33554432 kB\n",
    "proc/self/status": "Name:\tpython\nUid:\t1000\t1000\t1000\t1000\nThreads:\t7\nCapEff:\t0000000000000000\n"
    "Cpus_allowed_list:\t0-15\n",
    "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max processes             unlimited            unlimited            processes \n"
    "Max open files            1024                 524288               files     \n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
}
VERSION_1 = {
    "proc/self/cgroup": "8:pids:/kubepods/pod1/c1\n4:memory:/kubepods/pod1/c1\n2:cpu,cpuacct:/kubepods/pod1/c1\n0::/\n",
    "proc/self/mountinfo": "".join(
        f"3{index} 23 0:2{index} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
        for index, name in enumerate(("memory", "cpu,cpuacct", "pids"))
    ),
}


@pytest.fixture
def machine(tmp_path):
    """Writes a machine of 64 GiB and 16 cores, with the given files in addition, and reads its limits."""

    def read(files=()):
        for name, text in {**MACHINE, **dict(files)}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_machine_limits(tmp_path)

    return read


def test_machine_without_a_container_has_no_limits(machine):
    limits = machine()
    assert (limits.memory_bytes, limits.available_memory_bytes) == (64 * GIB, 32 * GIB)
    assert limits.num_cpus == 16
    assert limits.max_threads is limits.available_threads is None
    assert limits.max_open_files == 524288


@pytest.mark.parametrize("above", ["max\n", f"{128 * GIB}\n"])
def test_machine_limits_of_version_2_are_the_smallest(machine, above):
    limits = machine(
        {
            "proc/self/cgroup": "0::/kubepods.slice/pod1/c1\n",
            "sys/fs/cgroup/kubepods.slice/memory.max": above,
            "sys/fs/cgroup/kubepods.slice/pod1/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/kubepods.slice/pod1/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/kubepods.slice/pod1/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7\n",
            "sys/fs/cgroup/kubepods.slice/pod1/c1/memory.max": "max\n",
            "sys/fs/cgroup/kubepods.slice/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods.slice/pod1/c1/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/kubepods.slice/pod1/pids.max": "300\n",
            "sys/fs/cgroup/kubepods.slice/pod1/pids.current": "40\n",
            "sys/fs/cgroup/kubepods.slice/pod1/c1/pids.max": "900\n",
        }
    )
    assert (limits.memory_bytes, limits.available_memory_bytes) == (8 * GIB, 5 * GIB)
    assert limits.num_cpus == 2
    assert (limits.max_threads, limits.available_threads) == (300, 260)


def test_machine_limits_of_version_1_are_the_smallest(machine):
    limits = machine(
        {
            **VERSION_1,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/kubepods/pod1/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/kubepods/pod1/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/kubepods/pod1/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/kubepods/pod1/c1/memory.limit_in_bytes": f"{6 * GIB}\n",
            "sys/fs/cgroup/cpu,cpuacct/kubepods/pod1/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/kubepods/pod1/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/kubepods/pod1/c1/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/pids/kubepods/pod1/c1/pids.max": "120\n",
            "sys/fs/cgroup/pids/kubepods/pod1/c1/pids.current": "200\n",
        }
    )
    assert (limits.memory_bytes, limits.available_memory_bytes) == (4 * GIB, 2 * GIB)
    assert limits.num_cpus == 1
    assert (limits.max_threads, limits.available_threads) == (120, 0)


def test_machine_with_both_versions_reads_both(machine):
    """Memory is still of version 1, and version 2 holds the limit of threads."""
    limits = machine(
        {
            "proc/self/cgroup": "4:memory:/box\n1:name=systemd:/box\n0::/box\n",
            "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
            "32 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "33 31 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/unified/box/pids.max": "70\n",
        }
    )
    assert limits.memory_bytes == limits.available_memory_bytes == GIB
    assert limits.max_threads == limits.available_threads == 70


@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/docker/abc", "/docker/abc"),  # without a namespace, the container's own group is mounted
        ("/docker/abc", "/"),  # the path is that of the machine, and only its top is to be seen
        ("/../../elsewhere", "/"),
        ("/docker/abc/deeper", "/docker/abc"),
    ],
)
def test_machine_finds_a_containers_group(machine, path, mounted):
    group = f"30 23 0:26 {mounted} /sys/fs/cgroup\\040of\\040mine rw - cgroup2 cgroup2 rw\n"
    files = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": group}
    assert machine({**files, "sys/fs/cgroup of mine/memory.max": f"{GIB}\n"}).memory_bytes == GIB


def test_machine_counts_a_users_threads(machine):
    others = {
        "proc/12/status": "Uid:\t1000\t1000\t1000\t1000\nThreads:\t30\n",
        "proc/13/status": "Uid:\t0\t0\t0\t0\nThreads:\t500\n",
        "proc/14/status": "Uid:\t10001\t0\t0\t0\nThreads:\t500\n",
    }
    limits = "Max processes             150                  200                  processes \n"
    found = machine({**others, "proc/self/limits": limits})
    assert (found.max_threads, found.available_threads) == (150, 120)
    for exempt in ("Uid:\t0\t0\t0\t0\n", "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t000001ffffffffff\n"):
        assert machine({**others, "proc/self/limits": limits, "proc/self/status": exempt}).max_threads is None


@pytest.mark.parametrize(("allowed", "count"), [("0", 1), ("0-1,4-7,9", 7)])
def test_machine_counts_allowed_cores(machine, allowed, count):
    assert machine({"proc/self/status": f"Cpus_allowed_list:\t{allowed}\n"}).num_cpus == count


@pytest.mark.parametrize("text", ["", "max\n", "many\n", "-1\n", "0 0\n", "max max\n"])
def test_machine_takes_other_words_for_no_limit(machine, text):
    names = ("memory.max", "cpu.max", "pids.max", "memory.limit_in_bytes", "cpu.cfs_quota_us", "memory.current")
    limits = machine({f"sys/fs/cgroup/{name}": text for name in names})
    assert (limits.memory_bytes, limits.num_cpus, limits.max_threads) == (64 * GIB, 16, None)


def test_machine_without_proc_asks_the_system(tmp_path):
    limits = read_machine_limits(tmp_path)
    assert limits.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limits.num_cpus == os.cpu_count()
    assert limits.max_threads is limits.max_open_files is None


def test_machine_limits_of_this_process_are_sound():
    limits = read_machine_limits()
    assert 0 <= limits.available_memory_bytes <= limits.memory_bytes
    assert 1 <= limits.num_cpus <= len(os.sched_getaffinity(0))
