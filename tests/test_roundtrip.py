"""Random nested states in every way torch reads a file: ours gives what that of torch.save gives, or as it refuses."""

from __future__ import annotations

import collections
import itertools
import pathlib
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from fuzzing import examples
from hypothesis import HealthCheck, given, settings
from test_image import Fragment, Stage, assert_equal, from_file, pools, to_bytes, torch_bytes, trees
from torch.utils.serialization import config as serialization_config

pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in ("ComplexHalf", "TypedStorage is deprecated")]
MODES = list(itertools.product((False, True), repeat=3))  # mmap, weights_only, calculate_storage_offsets

others = st.one_of(
    st.builds(Fragment, st.integers(0, 9), st.just(torch.ones(2))),
    st.sampled_from([Stage.weights, torch.float16, torch.Size([2, 3]), torch.device("cpu"), 2**70, 1j, -0.0]),
    st.sets(st.integers(0, 9), max_size=3),
    st.integers(0, 40).map(lambda step: optimizer_after(step % 4)),
    st.integers(0, 3).map(lambda seed: torch.Generator().manual_seed(seed).get_state()),
)


def optimizer_after(steps: int) -> dict[str, object]:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}


@st.composite
def states(draw: st.DrawFn) -> object:
    """A tree of views on few storages, beside what else users put into a checkpoint."""
    tree = draw(trees(draw(pools())))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return tree
    rest = draw(others)
    return {1: [tree, rest], 2: collections.OrderedDict(tree=tree, rest=rest, again=tree), 3: (rest, {"t": tree})}[kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    yield tmp_path_factory.mktemp("roundtrip")


def read(path: pathlib.Path, mapped: bool, weights_only: bool, calculate: bool) -> tuple[str, object]:
    """("", what is loaded), or the kind of its error."""
    with serialization_config.patch("load.calculate_storage_offsets", calculate):
        try:
            return "", torch.load(path, mmap=mapped, weights_only=weights_only)
        except Exception as error:  # compared below
            return type(error).__name__, None


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(states())
def test_any_state_reads_alike_in_every_mode_and_is_refused_where_torchs_is(
    folder: pathlib.Path, state: object
) -> None:
    ours, theirs = folder / "ours.pt", folder / "theirs.pt"
    for path in (ours, theirs):
        path.unlink(missing_ok=True)  # never under a mapping of the last example
    ours.write_bytes(to_bytes(state))
    theirs.write_bytes(torch_bytes(state))
    for mode in MODES:
        wanted, found = read(theirs, *mode), read(ours, *mode)
        assert found[0] == wanted[0], mode
        if not wanted[0]:
            assert_equal(wanted[1], found[1])
    assert read(ours, False, False, False)[0] == ""


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(states())
def test_what_is_loaded_and_saved_again_is_the_same_once_more(folder: pathlib.Path, state: object) -> None:
    path = folder / "once.pt"
    path.unlink(missing_ok=True)
    path.write_bytes(to_bytes(state))
    loaded = from_file(path)
    path.unlink()
    again = to_bytes(loaded)
    path.write_bytes(again)
    assert_equal(loaded, from_file(path))
