"""What the system says a process may use: limits of containers count."""

import os
from pathlib import Path

import pytest

from engine.machine import mount_of, nearest_existing, this_machine

GIB = 2**30


def fake(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


BARE = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 2.60GHz\n"
    "flags\t\t: fpu avx2 avx512f amx_bf16 amx_tile\n\nprocessor\t: 1\nmodel name\t: Other\n",
    "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n",
    "proc/self/cgroup": "0::/\n",
}


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    machine = this_machine(fake(tmp_path, BARE))
    assert machine.cpu == "Some CPU @ 2.60GHz"
    assert machine.flags == ("avx2", "avx512f", "amx_tile", "amx_bf16")
    assert (machine.memory, machine.available) == (16 * GIB, 8 * GIB)
    assert machine.quota is None
    assert machine.usable == machine.physical == machine.allowed > 0


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/app/job\n",
            "sys/fs/cgroup/app/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/app/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/app/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/app/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/app/job/memory.max": "max\n",
        },
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/app\n3:memory:/app\n2:pids:/app\n1:name=x:/\n",
            "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/memory/app/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/app/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_the_tightest_limit_of_all_groups_counts(tmp_path: Path, files: dict[str, str]) -> None:
    machine = this_machine(fake(tmp_path, BARE | files))
    assert machine.quota == 1.5
    assert machine.usable <= 2
    assert (machine.memory, machine.available) == (4 * GIB, 3 * GIB)


@pytest.mark.parametrize(
    ("allowed", "physical"),
    [({0, 1, 2, 3, 4, 5}, 4), ({0, 1}, 2), ({1, 4}, 1), ({3, 5}, 2)],
    ids=["all", "two cores", "one core's two threads", "not listed"],
)
def test_hyperthreads_of_a_core_are_one_core_to_compute_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], physical: int
) -> None:
    siblings = {0: "0,3", 1: "1,4", 3: "0,3", 4: "1,4"}  # nothing is said of 2 and 5
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{names}\n"
        for cpu, names in siblings.items()
    }
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
    machine = this_machine(fake(tmp_path, BARE | files))
    assert machine.allowed == len(allowed)
    assert machine.usable == machine.physical == physical
    quota = {"sys/fs/cgroup/cpu.max": "290000 100000\n"}
    assert this_machine(fake(tmp_path, quota)).usable == min(physical, 3)


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "5000\n"}
    assert this_machine(fake(tmp_path, BARE | files)).available == 0


def test_a_system_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    machine = this_machine(tmp_path)
    assert machine.flags == ()
    assert machine.cores >= 1
    assert machine.usable >= 1


MOUNTS = (
    "22 1 8:1 / / rw - ext4 /dev/root rw\n"
    "23 22 0:20 / {there} rw,relatime shared:1 - tmpfs tmpfs rw\n"
    "24 23 0:21 / {there}/a\\040b rw - fuse.sshfs host: rw\n"
)


def test_the_innermost_file_system_is_named(tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "a b").mkdir(parents=True)
    root = fake(tmp_path / "root", {"proc/self/mountinfo": MOUNTS.format(there=there)})

    def kind(path: Path) -> str:
        mount = mount_of(path, root)
        assert mount is not None
        return mount.type

    assert kind(tmp_path) == "ext4"
    assert kind(there / "not" / "made" / "yet") == "tmpfs"
    assert kind(there / "a b" / "store") == "sshfs"
    assert kind(there.with_name("therefore")) == "ext4"  # another folder that begins alike


def test_no_mounts_known_is_no_error(tmp_path: Path) -> None:
    assert mount_of(tmp_path, tmp_path) is None


def test_nearest_existing_makes_nothing(tmp_path: Path) -> None:
    assert nearest_existing(tmp_path / "x" / "y") == tmp_path
    assert list(tmp_path.iterdir()) == []
