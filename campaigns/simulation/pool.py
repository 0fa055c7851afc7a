"""Seeds on all processors: one world after the other in each process.

outcomes(seeds) -> processes, each prepared so that a seed gives the same run in all of them -> Outcome, in that order
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HASH_SEED = "0"  # the order of sets must be the same in every process, so that a seed gives the same run


@dataclass(frozen=True)
class Outcome:
    """The result of one seed. `epochs`: the number of whole epochs of its readers; `record`: what was heard
    (recording.py)."""

    seed: int
    kind: str
    digest: str
    virtual_s: float
    epochs: int
    violations: tuple[tuple[str, str], ...]
    record: str


def run_seed(
    seed: int, *, verbose: bool = False, without: frozenset[str] = frozenset(), kinds: Sequence[str] = ()
) -> Outcome:
    """One world, from its begin to its end."""
    from campaigns.simulation.world import World

    world = World(seed, verbose=verbose, without=without, kinds=kinds)
    world.run()
    epochs = world.epochs.whole if world.epochs is not None else 0
    violations = tuple(world.checker.violations)
    record = world.checker.recording.line(seed, world.kind, world.digest, len(violations))
    return Outcome(seed, world.kind, world.digest, round(world.loop.now, 3), epochs, violations, record)


def _work(arguments: tuple[int, frozenset[str], str, Sequence[str]]) -> Outcome:
    seed, without, broken, kinds = arguments
    with broken_by(broken):
        return run_seed(seed, without=without, kinds=kinds)


def broken_by(name: str) -> contextlib.AbstractContextManager[None]:
    if not name:
        return contextlib.nullcontext()
    from campaigns.simulation.breaks import BREAKS

    return BREAKS[name].applied()


def prepare() -> None:
    import campaigns.simulation.world  # noqa: F401 - before the collector is frozen

    gc.collect()
    gc.freeze()
    gc.disable()  # a world collects once, at its end: automatic collections do not depend on the seed


def outcomes(
    seeds: range,
    jobs: int,
    *,
    without: frozenset[str] = frozenset(),
    broken: str = "",
    kinds: Sequence[str] = (),
) -> Iterator[Outcome]:
    """The outcomes in the order of the seeds."""
    work = ((seed, without, broken, kinds) for seed in seeds)
    if jobs == 1:
        prepare()
        yield from map(_work, work)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, prepare, maxtasksperchild=500) as pool:
        try:
            yield from pool.imap(_work, work)
        finally:
            pool.terminate()
