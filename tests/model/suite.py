"""All models with the bounds that are explored each time; together about two minutes on two slow cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import scenes
from .explorer import Model
from .joining import Joining
from .lines import Lines
from .node import Node

MODELS: list[Callable[[], Model[Any]]] = [
    lambda: Node("SM", deaths=0),
    lambda: Node("MMM", deaths=0, mishaps=1),
    lambda: Node("MMM", deaths=0, drift=1),
    lambda: Node("MMM", deaths=0, drift=1, slots=3),
    lambda: Node("S", deaths=0, mishaps=1),
    lambda: Node("S", deaths=1),
    lambda: Node("S", deaths=1, grace=True),
    lambda: Node("MS", deaths=1),
    lambda: Node("S", "M", deaths=1, together=True, late=True),
    lambda: Node("SS", "S", ranks=1, deaths=2),
    *scenes.SCENES,
    lambda: Lines(),
    lambda: Joining(deaths=1, savers=3),
    lambda: Joining(deaths=1, old=True),
]
