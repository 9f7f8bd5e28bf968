"""argv → one saver. ``python -m ckpt_engine.saver run --root DIR`` or ``ckpt-engine saver run --root DIR``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence

from ckpt_engine.config import SaverOptions, hook_from_environment, require_linux
from ckpt_engine.errors import CkptError, ConfigError
from ckpt_engine.names import names_for
from ckpt_engine.saver.server import Server


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="ckpt-engine saver", description="The daemon that makes checkpoints of what ranks stage."
    )
    verbs = top.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="persist what the ranks of this node stage, until they are gone")
    run.add_argument("--root", required=True, help="checkpoint directory, as given to attach() or CheckpointEngine()")
    run.add_argument("--job", default="", help="job id, if the ranks were given one")
    run.add_argument("--name", default="default", help="engine name, if the ranks were given one")
    run.add_argument("--node-id", default="", help="node id, if the ranks were given one")
    run.add_argument("--stay", action="store_true", help="do not leave when no rank is there (service, sidecar)")
    run.add_argument("--options", default="{}", help="JSON of SaverOptions, e.g. '{\"linger_s\": 600}'")
    run.add_argument("--identity", default="{}", help=argparse.SUPPRESS)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a saver to its end; 0 = retired, 3 = another saver is there already, 2 = cannot start."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s saver %(message)s")
    try:
        require_linux()
        os.chdir("/")
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))  # not the one core of the rank that started us
        identity = {"job": arguments.job, "name": arguments.name, "node_id": arguments.node_id}
        identity |= _json("--identity", arguments.identity)
        options = SaverOptions.from_dict(_json("--options", arguments.options))
        with contextlib.suppress(OSError):
            os.nice(
                int(options.nice)
            )  # the training goes first: for the processor and, its level follows, for the disk
        hook_from_environment()
        root = os.path.realpath(arguments.root)
        server = Server(names_for(root=root, **identity), root=root, options=options, stay=arguments.stay)
        return server.run()
    except (CkptError, OSError, TypeError) as error:
        logging.getLogger("ckpt_engine").error("cannot run: %s", error)
        return 2


def _json(option: str, text: str) -> dict[str, str]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} must be JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{option} must be a JSON object, not {text!r}")
    return values


if __name__ == "__main__":
    sys.exit(main())
