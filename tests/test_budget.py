"""How many slots fit: the tightest of tmpfs, memory and every cgroup level decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine import budget, shm
from ckpt_engine.budget import Room, copy_threads, room, slots_for_node
from ckpt_engine.errors import ShmFull

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 100 GiB of everything."""
    monkeypatch.setattr(shm, "free_bytes", lambda: 100 << 30)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {100 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("")
    return tmp_path


def look(tree: Path) -> Room:
    return room(tree / "cg", tree / "proc")


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_cgroups_tmpfs_or_available_memory_binds(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(tree).limit in ("/dev/shm", "MemAvailable")
    monkeypatch.setattr(shm, "free_bytes", lambda: 64 * MIB)
    assert look(tree) == Room(60 * MIB, "/dev/shm")
    monkeypatch.setattr(shm, "free_bytes", lambda: 100 << 30)
    (tree / "proc/meminfo").write_text(f"MemAvailable: {2 << 20} kB\n")
    assert look(tree) == Room((2 << 30) - 64 * MIB, "MemAvailable")


def test_of_all_levels_of_cgroup_v2_the_tightest_counts(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("0::/pod/container/inner\n")
    put(tree / "cg/pod/container/inner", memory__max="max\n", memory__current="5\n")
    put(tree / "cg/pod/container", memory__max=f"{4 << 30}\n", memory__current=f"{3 << 30}\n")
    put(tree / "cg/pod", memory__max=f"{8 << 30}\n", memory__current=f"{3 << 30}\n")
    found = look(tree)
    assert found == Room((1 << 30) - 64 * MIB, str(tree / "cg/pod/container/memory.max"))


def test_page_cache_that_the_kernel_would_drop_is_free(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("0::/c\n")
    stat = f"anon 7\ninactive_file {512 * MIB}\nactive_file 9\n"
    put(tree / "cg/c", memory__max=f"{1 << 30}", memory__current=f"{1 << 30}", memory__stat=stat)
    assert look(tree).free_bytes == 512 * MIB - 32 * MIB


def test_the_memory_controller_of_cgroup_v1_counts_beside_an_empty_v2(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/job/step\n0::/\n")
    put(tree / "cg/memory/job/step", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="1")
    put(tree / "cg/memory/job", memory__limit_in_bytes=str(3 << 30), memory__usage_in_bytes=str(1 << 30))
    put(tree / "cg/memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="1")
    assert look(tree).limit == str(tree / "cg/memory/job/memory.limit_in_bytes")
    assert look(tree).free_bytes == (2 << 30) - 64 * MIB


@pytest.mark.parametrize("text", ["", "nonsense", "0::/gone\n", "x\n", "4:memory:/../../etc\n"])
def test_a_cgroup_tree_that_cannot_be_read_limits_nothing(tree: Path, text: str) -> None:
    (tree / "proc/self/cgroup").write_text(text)
    assert look(tree).free_bytes > 90 << 30


def test_more_in_use_than_allowed_leaves_nothing(tree: Path) -> None:
    (tree / "proc/self/cgroup").write_text("0::/c\n")
    put(tree / "cg/c", memory__max="100", memory__current="200")
    assert look(tree).free_bytes == 0


def fits(wanted: int, free: int, *, held: int = 0, ranks: int = 4) -> int:
    return slots_for_node(
        wanted=wanted, slot_bytes=10, local_ranks=ranks, held_bytes=held, found=Room(free, "/dev/shm")
    )


def test_all_slots_of_all_local_ranks_must_fit_else_one_each_else_an_error_that_names_the_limit() -> None:
    assert fits(2, 80) == 2
    assert fits(2, 79) == 1
    assert fits(3, 100) == 1
    assert fits(2, 40) == 1
    assert fits(2, 0, held=80) == 2, "what this engine holds already is not lost"
    with pytest.raises(ShmFull, match="4 local ranks needs 40 bytes; /dev/shm leaves 39") as caught:
        fits(2, 39)
    assert (caught.value.need_bytes, caught.value.free_bytes, caught.value.limit) == (40, 39, "/dev/shm")


def test_a_slot_leaves_room_to_grow() -> None:
    assert budget.GROWTH > 1


def threads(tree: Path, local_world: int, asked: int = 0) -> int:
    return copy_threads(asked, local_world, tree / "cg", tree / "proc")


@pytest.fixture
def sixteen(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 processors."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tree


def test_a_rank_copies_with_its_share_of_the_processors(sixteen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [threads(sixteen, ranks) for ranks in (1, 4, 16, 64)] == [8, 4, 1, 1]
    assert threads(sixteen, 64, asked=3) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [threads(sixteen, ranks) for ranks in (1, 4, 16)] == [2, 2, 1]


def test_no_cgroup_has_more_threads_than_its_quota_leaves(sixteen: Path) -> None:
    (sixteen / "proc/self/cgroup").write_text("4:cpu,cpuacct:/v1\n0::/pod/inner\n")
    put(sixteen / "cg/pod/inner", cpu__max="max 100000\n")
    put(sixteen / "cg/pod", cpu__max="650000 100000\n")
    assert [threads(sixteen, ranks) for ranks in (1, 2, 4, 8)] == [6, 3, 1, 1]
    put(sixteen / "cg/cpu/v1", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert threads(sixteen, 1) == 6
    put(sixteen / "cg/cpu/v1", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    assert threads(sixteen, 1) == 1


@pytest.mark.parametrize("text", ["", "max", "x 100000", "100000 0"])
def test_a_quota_that_cannot_be_read_is_none(sixteen: Path, text: str) -> None:
    (sixteen / "proc/self/cgroup").write_text("0::/c\n")
    put(sixteen / "cg/c", cpu__max=text)
    assert threads(sixteen, 1) == 8
