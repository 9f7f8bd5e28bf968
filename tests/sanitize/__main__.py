"""``python -m tests.sanitize [asan] [tsan] [seeds]``: csrc under sanitizers; exits 1 on any report.

That is ASan + UBSan (+ LSan in a program without Python), and TSan.

Copies of the package with an extension of their own are built below ``build/sanitize``; the one in place is not
touched. Each copy runs

* ``drive.py``: threads of the pool, populate with concurrent stops, words and progress that are read while written;
* ``tests/test_csrc.py``, and the tests that move bytes through the native part (``TESTS``);

and ``natively.cpp`` runs the headers below the bindings in a process without an interpreter, where leaks are looked
for too. Reports of every process, forked and killed ones included, go to files: one file is one failure. So that
nobody trusts a blind set-up, each sanitizer must then find a bug that is sown into a copy of the sources (``SEEDS``).

Nothing of ours is suppressed. Of others:

* ``detect_leaks=0`` under Python: the interpreter and pybind11 do not free what they hold at exit.
* ``null:pybind11.h``: the interpreter ends a daemon thread by ``pthread_exit``, whose exception has no object;
  pybind11 catches it by reference and throws it on.
* ``race:_dl_deallocate_tls``: the C library frees the thread-local storage of a thread that has been joined; TSan
  does not see what orders that after the thread's last use of it.
* ``die_after_fork=0``: TSan would refuse the threads of a forked child, which are what some tests are about.
* ``LEFT_OUT``: before GCC 14, ASan's allocator is not made ready for a fork beside threads that allocate; the child
  may hang in it. TSan runs that test.

What is not seen: by TSan other processes (two that exchange one word are run, and counted), the kernel, and the
vector stores of the kernels for AVX (a page without access guards what lies behind a destination). By design TSan is
not shown a copy beside a populate on kernels without MADV_POPULATE_WRITE: there a byte of each page is replaced by
itself, by compare-exchange. Beside plain stores that is a race in the letter of the C++ memory model, and harmless
on the hardware we know: the exchange writes only what it has just seen unchanged. Under ASan that pair is run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.sanitize.build import BUILD, REPOSITORY, SEEDS, Copy, missing, native, package

TESTS = {
    "asan": ["test_csrc", "test_storage", "test_staging", "test_slots", "test_control", "test_image"],
    "tsan": ["test_csrc", "test_storage", "test_staging", "test_slots", "test_control"],
}
LEFT_OUT = {
    "asan": (
        "tests/test_csrc.py::test_a_fork_in_the_middle_of_copies_leaves_both_sides_able",
        "tests/test_csrc.py::test_a_forked_child_does_not_wait_for_its_parents_populate",
    )
}


def pytest_of(kind: str) -> list[str]:
    files = [str(REPOSITORY / "tests" / f"{name}.py") for name in TESTS[kind]]
    config = ["-c", str(REPOSITORY / "pyproject.toml"), "--rootdir", str(REPOSITORY), "-p", "no:cacheprovider"]
    left_out = [f"--deselect={name}" for name in LEFT_OUT.get(kind, ())]
    return [sys.executable, "-m", "pytest", "-q", *config, *left_out, *files]


def drive(kind: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / "tests" / "sanitize" / "drive.py"), kind]


def run(copy: Copy, what: str, command: list[str], *, finds: str = "") -> bool:
    """Run ``command`` on ``copy``; True if it went as it should: no report, or the one that ``finds`` names."""
    begin = time.monotonic()
    shutil.rmtree(copy.reports, ignore_errors=True)
    copy.reports.mkdir(parents=True)
    log = copy.folder / f"{what}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            command, cwd=copy.folder, env=copy.environment(), stdout=output, stderr=output, timeout=900
        )
    reports = [path.read_text(errors="replace") for path in sorted(copy.reports.iterdir())]
    if "runtime error:" in (printed := log.read_text(errors="replace")):  # beside ASan, UBSan prints and ends with 97
        reports.append(printed)
    if finds:
        good, said = any(finds in report for report in reports), f"found: {finds}"
    else:
        good, said = done.returncode == 0 and not reports, (log.read_text().strip().splitlines() or ["ended"])[-1]
    if not good:
        said = f"exit {done.returncode}, {len(reports)} reports"
        print("\n".join([*reports[:3], *([] if reports else log.read_text(errors="replace").splitlines()[-60:])]))
    print(f"{'ok ' if good else 'BAD'} {copy.name:<34} {what:<8} {time.monotonic() - begin:5.0f} s  {said}", flush=True)
    return good


def main() -> int:
    parts = sys.argv[1:] or [*TESTS, "seeds"]
    if absent := missing():
        sys.exit(f"make sanitize needs g++ and its sanitizers' libraries; not found: {', '.join(absent)}")
    shutil.rmtree(BUILD, ignore_errors=True)
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as builders:
        kinds, seeds = [kind for kind in TESTS if kind in parts], SEEDS if "seeds" in parts else ()
        packages = {kind: builders.submit(package, kind) for kind in kinds}
        programs = {kind: builders.submit(native, kind) for kind in kinds}
        sown = [(seed, builders.submit(native if seed.native else package, seed.kind, seed)) for seed in seeds]
    print(f"built in {time.monotonic() - begin:.0f} s below {BUILD}", flush=True)
    good = []
    for kind in kinds:
        program, copy = programs[kind].result(), packages[kind].result()
        good += [
            run(program, "native", program.native_command()),
            run(copy, "drive", drive(kind)),
            run(copy, "pytest", pytest_of(kind)),
        ]
    for seed, built in sown:
        copy = built.result()
        command = copy.native_command() if seed.native else drive(seed.kind)
        good.append(run(copy, "seed", command, finds=seed.finds))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
