"""The real disk, the native writer and the real saver, held to the model by what the kernel was asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disk_model import Killed

import ckpt_engine
from ckpt_engine.manifest import Attempt

from .checks import Broken, check, check_recovered, require
from .choices import selections
from .explore import Tally
from .fault_disk import FaultDisk, Step
from .savers import ROOT, History
from .syscalls import Call, Replay, require_same_tree, trace

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(ckpt_engine.__file__).parent
POSIX, WRITER = PACKAGE / "storage" / "posix.py", REPOSITORY / "csrc" / "writer.h"


def environment(package_parent: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")}
    paths = [str(package_parent), str(REPOSITORY), str(REPOSITORY / "tests")]
    kept["CRASH_PACKAGE"] = str(package_parent)
    return kept | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def traced(program: str, scratch: Path, package_parent: Path = PACKAGE.parent) -> tuple[list[Call], str]:
    """The calls of one of ``programs`` on a new directory, and that directory."""
    root = os.path.realpath(scratch / "root")
    os.mkdir(root)
    arguments = ["-m", "tests.crash.programs", program, root]
    return trace(arguments, scratch / "calls", environment(package_parent)), root


def facts_of(mark: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes.fromhex(mark))
    return found


# -- the verbs -------------------------------------------------------------------------------------------------------


def keep_verbs(scratch: Path, package_parent: Path = PACKAGE.parent) -> Tally:
    """What a verb has promised when it returned is durable by then. Raises Broken."""
    tally = Tally("traced verbs")
    seen, root = traced("verbs", scratch, package_parent)
    disk = FaultDisk()
    disk.make_dir(ROOT)
    disk = disk.settled()
    replay = Replay(disk, root, ROOT)
    for call in seen:
        mark = replay.do(call)
        if mark is None:
            continue
        facts = facts_of(mark)
        tally.steps += 1
        for picked in selections(choices := disk.choices(), disk.pending, 64):
            tally.cases += 1
            left, _ = disk.cut(choices, picked)
            _promised(facts, disk, left, root)
    require_same_tree(disk, root, ROOT)
    require(tally.steps == 9, "the program came to its end", tally.steps)
    return tally


def _promised(facts: dict[str, Any], disk: FaultDisk, left: FaultDisk, root: str) -> None:
    if "name" in facts:
        path = ROOT + facts["name"][len(root) :]
        require(left.find(path) is not None, "sync_dir makes names durable", path)
    else:
        path, want = ROOT + facts["bytes"][len(root) :], (facts["nbytes"], facts["crc32"])
        held = disk.files[disk.find(path) or 0]
        require((len(held.data), zlib.crc32(held.data)) == want, "what was to be written is written", path)
        require(held.durable == held.data, "write_new and sync_file make bytes durable", path)


# -- whole saves -----------------------------------------------------------------------------------------------------


def keep_saves(scratch: Path, bound: int) -> Tally:
    """Cuts the power ahead of every call of one save, one re-save and one retention. Raises Broken."""
    tally = Tally("traced saves")
    seen, root = traced("saves", scratch)
    marks = [facts_of(call_mark) for call in seen if (call_mark := _mark_of(call))]
    attempts = [Attempt.from_dict(facts["attempt"]) for facts in marks if "done" in facts]
    require(len(attempts) == 3, "three saves were done", attempts)
    history = History()
    disk = FaultDisk()
    disk.make_dir(ROOT)
    disk = disk.settled()
    cutter = _RealCutter(disk, history, tally, bound)
    replay = Replay(disk, root, ROOT)
    disk.before = cutter
    ahead = iter(attempts)
    for call in seen:
        try:
            mark = replay.do(call)
        except Killed:
            raise cutter.broken or Broken("killed") from cutter.broken
        if mark is None:
            continue
        facts = facts_of(mark)
        if "begin" in facts:
            attempt = next(ahead)
            history.begin(attempt)
            if attempt.tag == "three":  # keeps one: its predecessor goes once it is committed, maybe before we are told
                history.expected.clear()
        else:
            history.commit(Attempt.from_dict(facts["attempt"]), whole=True)
    cutter.cut("at the end")
    disk.before = lambda step: None
    require_same_tree(disk, root, ROOT)
    return tally


def _mark_of(call: Call) -> str | None:
    return Replay(FaultDisk(), "/nowhere", ROOT).do(call) if call.name == "rmdir" else None


class _RealCutter:
    def __init__(self, disk: FaultDisk, history: History, tally: Tally, bound: int) -> None:
        self.disk, self.history, self.tally, self.bound = disk, history, tally, bound
        self.broken: Broken | None = None

    def __call__(self, step: Step) -> None:
        self.tally.steps += 1
        try:
            self.cut(f"before step {self.tally.steps}: {step.kind} {step.path}")
        except Broken as broken:
            self.broken = broken
            raise Killed from broken

    def cut(self, where: str) -> None:
        disk, tally = self.disk, self.tally
        for picked in selections(choices := disk.choices(), disk.pending, self.bound):
            tally.cases += 1
            left, torn = disk.cut(choices, picked)
            key = (left.key(), self.history.mark(), torn)
            if key in tally.seen:
                continue
            tally.seen.add(key)
            tally.disks += 1
            try:
                check(left, self.history, bytes_of=None, torn=torn)
                check_recovered(left, self.history, torn=torn, bytes_of=None)
            except Broken as broken:
                raise Broken(f"{broken} [{where}]") from broken


# -- mutants of the disk itself --------------------------------------------------------------------------------------

PYTHON: list[tuple[str, str, str]] = [
    ("sync_dir without fsync", '            _sync(path or ".", os.O_DIRECTORY)\n', "            pass\n"),
    ("sync_file without fsync", "            _sync(path, 0)\n", "            pass\n"),
    ("_sync without fsync", "        os.fsync(fd)\n", "        pass\n"),
]
_FSYNC = "    file.check(retried([&] { return ::fsync(file); }));\n"
_CUT = "    if (nbytes % kSector != 0) file.check(retried([&] { return ::ftruncate(file, nbytes); }));\n"
NATIVE: list[tuple[str, str, str]] = [
    ("write_file without fsync", _FSYNC, ""),
    ("write_file cuts the file after its fsync", _CUT + _FSYNC, _FSYNC + _CUT),
]


def mutants(scratch: Path) -> list[tuple[str, Callable[[], Tally]]]:
    """(name, test on a changed copy of the package) of every mutant of the native writer and of ``storage/posix``."""
    found: list[tuple[str, Callable[[], Tally]]] = []
    for number, (name, old, new) in enumerate(PYTHON):
        found.append((f"storage.posix: {name}", lambda n=number, o=old, w=new: _on_python(scratch / f"p{n}", o, w)))
    for number, (name, old, new) in enumerate(NATIVE):
        found.append((f"csrc/writer.h: {name}", lambda n=number, o=old, w=new: _on_native(scratch / f"n{n}", o, w)))
    return found


def _on_python(scratch: Path, old: str, new: str) -> Tally:
    shutil.copytree(PACKAGE, scratch / "ckpt_engine")
    _edit(scratch / POSIX.relative_to(PACKAGE.parent), old, new)
    return keep_verbs(scratch, scratch)


def _on_native(scratch: Path, old: str, new: str) -> Tally:
    shutil.copytree(PACKAGE, scratch / "ckpt_engine", ignore=shutil.ignore_patterns("_C.*.so"))
    shutil.copytree(REPOSITORY / "csrc", scratch / "csrc")
    _edit(scratch / "csrc" / WRITER.name, old, new)
    build(scratch / "csrc", scratch / "ckpt_engine")
    return keep_verbs(scratch, scratch)


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        raise LookupError(f"the mutant does not fit {path.name} any more: {old!r}")
    path.write_text(text.replace(old, new))


def build(csrc: Path, into: Path) -> None:
    """The native part from ``csrc``, quickly."""
    import pybind11

    target = into / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", *headers]
    subprocess.run([*command, str(csrc / "bindings.cpp"), "-o", str(target), "-pthread"], check=True, timeout=300)
