#!/usr/bin/env python3
"""Judges the logs of steps.py: `check.py DIR` prints one JSON object and exits with 0 if no sample is lost or repeated.

Of a step that was done more than once (after a restart from an older checkpoint) the last world's counts: the others'
work was thrown away with their state. What is expected of an epoch does not use the trainer's own order: each sample of a
whole epoch exactly once; of a part of an epoch as many as its steps hold, none twice.

    samples   ids that count          lost, repeated   against what is expected
    steps     steps that count        missing          steps below the last one without any line
    redone    steps done by more than one world (0 if every world left at a boundary)
    overlaps  lines that a world wrote after the first line of a later one (two worlds trained at once)
    worlds    number of worlds        complete         whether all steps of the run are there
"""

import collections
import glob
import json
import os
import sys


def read(directory):
    """Lines as (step, world, time, ids). A torn last line (killed while it wrote) is dropped."""
    for path in glob.glob(os.path.join(directory, "log-*.txt")):
        with open(path, encoding="ascii") as file:
            for line in file:
                if line.endswith("\n"):
                    step, world, at, *ids = map(int, line.split())
                    yield step, world, at, ids


def check(directory):
    """The object that is printed."""
    with open(os.path.join(directory, "run.json"), encoding="utf-8") as file:
        run = json.load(file)
    per_epoch, batch = run["samples_per_epoch"], run["global_batch"]
    per_epoch_steps = -(-per_epoch // batch)
    lines = list(read(directory))
    by_step, began = collections.defaultdict(lambda: collections.defaultdict(list)), {}
    for step, world, at, ids in lines:
        by_step[step][world] += ids
        began[world] = min(at, began.get(world, at))
    later = {world: min((b for w, b in began.items() if w > world), default=None) for world in began}
    steps = max(by_step) + 1 if by_step else 0
    lost = repeated = samples = 0
    for epoch in range(-(-steps // per_epoch_steps)):
        first = epoch * per_epoch_steps
        inside = range(first, min(first + per_epoch_steps, steps))
        got = collections.Counter()
        for step in inside:
            if step in by_step:
                got.update(by_step[step][max(by_step[step])])
        samples += sum(got.values())
        repeated += sum(count - 1 for count in got.values()) + sum(not 0 <= name < per_epoch for name in got)
        lost += max(min(len(inside) * batch, per_epoch) - len(got), 0)
    return {
        "samples": samples,
        "lost": lost,
        "repeated": repeated,
        "steps": len(by_step),
        "missing": steps - len(by_step),
        "redone": sum(len(worlds) > 1 for worlds in by_step.values()),
        "overlaps": sum(later[world] is not None and at > later[world] for _, world, at, _ in lines),
        "worlds": len(began),
        "complete": steps >= run["steps"],
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check.py DIR (the --log directory of steps.py)")
    result = check(sys.argv[1])
    print(json.dumps(result))
    sys.exit(1 if result["lost"] or result["repeated"] else 0)
