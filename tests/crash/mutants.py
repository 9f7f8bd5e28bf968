"""Production with one fsync less, or with two steps exchanged: each must turn a test red.

The fsyncs are found in the source, so a new one is removed here, too. A function is changed at run time, by giving it
code that is compiled from the changed source of its module; nothing on disk is touched.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckpt_engine
from ckpt_engine import commit

PACKAGE = Path(ckpt_engine.__file__).parent
SYNCS = ("sync_dir", "sync_file", "sync_dirs_of")
ROOMS = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "storage" / "posix.py"})
"""posix.py is the disk itself: what it leaves out only the system calls show; see ``real``."""


@dataclass(frozen=True)
class Mutant:
    """``change`` edits the body of ``function`` (dotted) of ``module``; False: it does not fit any more."""

    module: str
    function: str
    name: str
    change: Callable[[ast.FunctionDef], bool]

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        module = importlib.import_module(self.module)
        target: Any = module
        for part in self.function.split("."):
            target = inspect.getattr_static(target, part)
        tree = ast.parse(Path(inspect.getsourcefile(module) or "").read_text())
        if not self.change(_function(tree, self.function)):
            raise LookupError(f"{self} does not fit the source any more")
        code = _code(compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec"), self.function)
        plain, finish = target.__code__, commit.finish
        target.__code__ = code
        try:
            yield
        finally:
            target.__code__, commit.finish = plain, finish

    def __str__(self) -> str:
        return f"{self.module.removeprefix('ckpt_engine.')}.{self.function}: {self.name}"


def _function(tree: ast.AST, dotted: str) -> ast.FunctionDef:
    found = tree
    for part in dotted.split("."):
        found = next(node for node in ast.iter_child_nodes(found)
                     if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part)  # fmt: skip
    if not isinstance(found, ast.FunctionDef):
        raise LookupError(dotted)
    return found


def _code(code: types.CodeType, dotted: str) -> types.CodeType:
    for part in dotted.split("."):
        code = next(one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == part)
    return code


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements in a function."""
    for inner in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            found = getattr(inner, name, None)
            if isinstance(found, list):
                yield found


def _is_sync(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
    return name in SYNCS


def fsyncs() -> list[Mutant]:
    """One for every fsync of the package above the disk itself."""
    found = []
    for path in ROOMS:
        module = ".".join(("ckpt_engine", *path.relative_to(PACKAGE).with_suffix("").parts))
        for dotted, function in _functions(ast.parse(path.read_text())):
            syncs = [one for body in _bodies(function) for one in body if _is_sync(one)]
            for number, one in enumerate(syncs):
                found.append(Mutant(module, dotted, f"without {ast.unparse(one)}", _without(number)))
    return found


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _without(number: int) -> Callable[[ast.FunctionDef], bool]:
    def change(function: ast.FunctionDef) -> bool:
        places = [(body, one) for body in _bodies(function) for one in body if _is_sync(one)]
        if number >= len(places):
            return False
        body, one = places[number]
        body[body.index(one)] = ast.Pass()
        return True

    return change


def exchanged(first: str, second: str) -> Callable[[ast.FunctionDef], bool]:
    """Two statements, found by what they begin with, change places."""

    def change(function: ast.FunctionDef) -> bool:
        places = []
        for text in (first, second):
            found = [(body, one) for body in _bodies(function) for one in body if ast.unparse(one).startswith(text)]
            if not found:
                return False
            places.append(found[0])
        (one_body, one), (other_body, other) = places
        here, there = one_body.index(one), other_body.index(other)
        one_body[here], other_body[there] = other, one
        return True

    return change


def inserted(text: str, before: str) -> Callable[[ast.FunctionDef], bool]:
    """Statements that come ahead of the one that begins with ``before``."""

    def change(function: ast.FunctionDef) -> bool:
        for body in _bodies(function):
            for index, one in enumerate(body):
                if ast.unparse(one).startswith(before):
                    body[index:index] = ast.parse(text).body
                    return True
        return False

    return change


def both(*changes: Callable[[ast.FunctionDef], bool]) -> Callable[[ast.FunctionDef], bool]:
    return lambda function: all(change(function) for change in changes)


def _replaced(old: str, new: str) -> Callable[[ast.FunctionDef], bool]:
    def change(function: ast.FunctionDef) -> bool:
        for body in _bodies(function):
            for index, one in enumerate(body):
                if ast.unparse(one).startswith(old):
                    body[index] = ast.parse(new).body[0] if new else ast.Pass()
                    return True
        return False

    return change


_RECEIPT_FIRST = """
if True:
    if len(header.node_ranks) == 1:
        commit.write_receipt(storage, root, commit.Receipt.of([self._record]))
    commit.write_shard_record(storage, root, self._record)
"""
_RECORD_FIRST = """
self._record = header.shard_record()
commit.write_shard_record(storage, root, self._record)
"""
_LATER = "later, commit.finish = commit.finish, lambda storage, root, manifest, keep_copies: None"
_NOW = """
commit.finish = later
if isinstance(result, commit.Published):
    self.ledger.retain(header, frozenset(), lambda other: not self.status(other))
    later(self._storage, header.root, result.manifest, keep_copies=False)
"""
_FILES_FIRST = """
for entry in manifest.files():
    if entry.origin != "tool":
        storage.unlink(os.path.join(folder, entry.name))
"""

SWAPS = [
    ("storage.base", "write_durably", "sync of the directory before the rename",
     exchanged("_renamed(", "storage.sync_dir(")),
    ("storage.base", "create_exclusive", "link before the bytes are written",
     exchanged("storage.write_new(temp, data)", "storage.link(temp, path)")),
    ("storage.base", "make_dirs", "sync of the parent before the directory is made",
     exchanged("try:", "storage.sync_dir(parent)")),
    ("saver.persist", "Writer._write", "files before the claim of the run (1, 2)",
     both(_replaced("self._committer.ledger.claim(header)", ""),
          inserted("self._committer.ledger.claim(header)", "slot.reset_progress()"))),
    ("saver.persist", "Writer._write", "shard record before the files (2)",
     inserted(_RECORD_FIRST, "each(")),
    ("commit", "write_shard_record", "shard record before the names of its files are synced (2)",
     exchanged("sync_dirs_of(", "write_durably(")),
    ("saver.persist", "Writer._write", "receipt before the shard record (2, 3)",
     _replaced("commit.write_shard_record(storage", _RECEIPT_FIRST)),
    ("commit", "_write_manifest", "manifest before the tombstone (4)",
     lambda function: _tombstone_last(function)),
    ("commit", "try_publish", "plain names and `latest` before the manifest (4, 5)",
     inserted("finish(storage, root, decided, keep_copies=True)", "try:")),
    ("settle", "_settle", "links before old names are removed (5)",
     exchanged("if tombstones:", "_install_all(")),
    ("settle", "_settle", "sync before the links (5)",
     exchanged("_install_all(", "sync_dirs_of(storage, folder, there)")),
    ("settle", "_clear", "sync before old names are removed (5)",
     exchanged("for name in sorted(doomed)", "storage.sync_dir(folder)")),
    ("settle", "_settle", "first names removed before the links (5)",
     exchanged("_install_all(", "if not (keep_copies or tombstones):")),
    ("settle", "_settle", "tombstones removed before old names and links (5)",
     exchanged("if tombstones:", "for path, older in")),
    ("settle", "_install_all", "model states not last (5)",
     _replaced("for name in sorted(names", "for name in sorted(names):\n"
               " _install(storage, os.path.join(copies, name), os.path.join(folder, name))")),
    ("settle", "finish", "`latest` before the plain names (5, 6)",
     exchanged("done_with = _settle(", "update_latest(")),
    ("settle", "finish", "first names and tombstones removed before `latest` (6)",
     exchanged("update_latest(", "done_with()")),
    ("settle", "update_latest", "`latest` before another's plain names (5, 6)",
     exchanged("if newest.manifest != settled", "write_durably(storage, path, data)")),
    ("saver.committer", "Committer._publish", "retention before `latest` (6, 7)",
     both(inserted(_LATER, "with span('publish'"), inserted(_NOW, "if isinstance(result, commit.Published)"))),
    ("sweep", "remove_checkpoint", "files removed before the tombstone (7)",
     inserted(_FILES_FIRST, "try:")),
    ("sweep", "_bury", "tombstone removed before the files (7)",
     inserted("storage.unlink(grave)", "done = manifest is None")),
    ("sweep", "_remove_files", "files removed before the tombstone is synced (7)",
     exchanged("for name in names", "storage.sync_dir(folder)")),
    ("settle", "_settle", "old names removed before the manifest is synced (4, 5)",
     exchanged("if tombstones:", "storage.sync_dir(folder)")),
]  # fmt: skip


def _tombstone_last(function: ast.FunctionDef) -> bool:
    block = function.body[-1]
    if not isinstance(block, ast.With) or not isinstance(block.body[0], ast.If):
        return False
    block.body = [*block.body[1:], block.body[0]]
    return True


def swaps() -> list[Mutant]:
    return [Mutant(f"ckpt_engine.{module}", function, name, change) for module, function, name, change in SWAPS]
