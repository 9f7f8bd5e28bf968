"""Builds ``ckpt_engine._C``; everything else about the package is in pyproject.toml."""

import shutil
import sys
import sysconfig
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

if not sys.platform.startswith("linux"):
    sys.exit("ckpt_engine needs Linux: it stages checkpoints in POSIX shared memory and message queues.")


class BuildNative(build_ext):
    """Says what is missing before the compiler does."""

    def build_extensions(self) -> None:
        compiler = self.compiler.compiler_so_cxx[0]
        headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if shutil.which(compiler) is None:
            sys.exit(f"ckpt_engine needs a C++17 compiler, and {compiler} was not found: install g++ or set CXX.")
        if not headers.exists():
            sys.exit(f"ckpt_engine needs the Python headers ({headers}): install python3-dev.")
        super().build_extensions()


setup(
    ext_modules=[
        Pybind11Extension(
            "ckpt_engine._C",
            ["csrc/bindings.cpp"],
            depends=sorted(glob("csrc/*.h")),
            cxx_std=17,
            extra_compile_args=["-O3", "-g0", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
