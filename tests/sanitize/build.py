"""Copies of the package, and of the native part alone, that are compiled for a sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "sanitize"
EXTENSION = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"  # asked once: of two threads, the second may be told None
CXX = os.environ.get("CXX", "g++")
FLAGS = {
    "asan": ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"],
    "tsan": ["-fsanitize=thread", "-Wno-tsan"],  # fences are not modelled; what orders our words is atomic itself
}
OF_OTHERS = {"ubsan": "null:pybind11.h", "tsan": "race:_dl_deallocate_tls"}
"""Suppressions; ``__main__`` says why."""
RUNTIMES = {"asan": ["libasan.so", "libubsan.so"], "tsan": ["libtsan.so"]}


@dataclass(frozen=True)
class Seed:
    """A bug for a copy of the sources: ``kind`` must say ``finds``. ``native``: without an interpreter."""

    kind: str
    what: str
    file: str
    old: str
    new: str
    finds: str
    native: bool = True


SEEDS = (
    Seed("asan", "one byte too far", "copy.h", "plain(piece.nbytes - done);", "plain(piece.nbytes - done + 1);",
         "heap-buffer-overflow", native=False),
    Seed("asan", "an index too large", "crc32.h", "(reg ^ *data) & 255]", "((reg ^ *data) & 255) | 256]",
         "out of bounds for type"),
    Seed("asan", "a leak", "copy.h", "std::vector<uint32_t> crcs((n", "auto& crcs = *new std::vector<uint32_t>((n",
         "LeakSanitizer: detected memory leaks"),
    Seed("tsan", "progress without atomics", "atomics.h", "__atomic_fetch_add(word, amount, __ATOMIC_ACQ_REL)",
         "*word += amount", "data race", native=False),
    Seed("tsan", "work dealt out without atomics", "pool.h", "for (size_t i; (i = next.fetch_add(1)) < count;)",
         "for (size_t i, &plain = reinterpret_cast<size_t&>(next); (i = plain++) < count;)", "data race"),
)  # fmt: skip


@dataclass(frozen=True)
class Copy:
    """One build: its folder is what a process on it has as working directory and PYTHONPATH."""

    name: str
    kind: str
    folder: Path
    native: bool

    @property
    def reports(self) -> Path:
        return self.folder / "reports"

    def native_command(self) -> list[str]:
        return [*_fixed_addresses(), str(self.folder / "natively"), str(self.folder)]

    def environment(self) -> dict[str, str]:
        """That of a process under this copy's sanitizer, and of all its children."""
        for sanitizer, line in OF_OTHERS.items():
            (self.folder / f"of-others-{sanitizer}").write_text(line + "\n")
        common = f"log_path={self.reports / 'report'}:exitcode=97"
        env = {
            **os.environ,
            "ASAN_OPTIONS": f"{common}:detect_leaks={int(self.native)}:detect_stack_use_after_return=1",
            "UBSAN_OPTIONS": f"{common}:print_stacktrace=1:halt_on_error=1:suppressions={self.folder}/of-others-ubsan",
            "TSAN_OPTIONS": f"{common}:die_after_fork=0:suppressions={self.folder}/of-others-tsan",
        }
        if not self.native:
            preload = [_found(name) for name in (*RUNTIMES[self.kind], "libstdc++.so.6")]
            env |= {"LD_PRELOAD": " ".join(preload), "PYTHONMALLOC": "malloc", "PYTHONPATH": str(self.folder)}
        return env


def missing() -> list[str]:
    if shutil.which(CXX) is None:
        return [CXX]
    return [name for names in RUNTIMES.values() for name in names if not Path(_found(name)).is_file()]


@cache
def _found(name: str) -> str:
    return subprocess.run([CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


def _fixed_addresses() -> list[str]:
    """TSan of older compilers cannot place its shadow where the kernel draws addresses from too wide a range."""
    return ["setarch", "-R"] if shutil.which("setarch") else []


def package(kind: str, seed: Seed | None = None) -> Copy:
    """The package with an extension that is compiled for ``kind``."""
    import pybind11

    copy = _made(kind, seed, native=False)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(REPOSITORY / "ckpt_engine", copy.folder / "ckpt_engine", ignore=ignored)
    target = copy.folder / "ckpt_engine" / EXTENSION
    includes = [f"-I{sysconfig.get_paths()['include']}", f"-isystem{pybind11.get_include()}"]
    _compile(
        kind, copy.folder / "csrc" / "bindings.cpp", target, ["-shared", "-fPIC", "-fvisibility=hidden", *includes]
    )
    return copy


def native(kind: str, seed: Seed | None = None) -> Copy:
    """``natively.cpp`` on its own."""
    copy = _made(kind, seed, native=True)
    source = Path(__file__).with_name("natively.cpp")
    _compile(kind, source, copy.folder / "natively", [f"-I{copy.folder / 'csrc'}"])
    return copy


def _made(kind: str, seed: Seed | None, *, native: bool) -> Copy:
    name = f"{kind}{'-native' if native and seed is None else ''}{': ' + seed.what if seed else ''}"
    folder = BUILD / name.replace(": ", "-").replace(" ", "-")
    shutil.copytree(REPOSITORY / "csrc", folder / "csrc")
    if seed:
        source = folder / "csrc" / seed.file
        text = source.read_text()
        if text.count(seed.old) != 1:
            raise SystemExit(
                f"{seed.file} has changed: the seed {seed.what!r} finds its place {text.count(seed.old)} times"
            )
        source.write_text(text.replace(seed.old, seed.new))
    return Copy(name, kind, folder, native)


def _compile(kind: str, source: Path, target: Path, options: list[str]) -> None:
    common = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-pthread"]
    subprocess.run([CXX, *common, *FLAGS[kind], *options, str(source), "-o", str(target)], check=True)
