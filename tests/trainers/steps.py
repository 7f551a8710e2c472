#!/usr/bin/env python3
"""A trainer of the standard library for tests and benches: it does nothing but keep exact count of its samples.

All ranks go through the steps together. The samples of step s are a pure function of (seed, epoch, s); rank r of n takes
every n-th of them, so the global batch is the same in every world. What each rank does in a step is a line of
DIR/log-GENERATION-RANK.txt:

    STEP WORLD TIME ID ID ...

written before the step's barrier; a checkpoint is written after it. So every step that a checkpoint holds is logged by all
ranks, and a step that was done again after a checkpoint stands there again under a later WORLD (start of that world in
ns). `check.py DIR` judges. Events (start, connected, first_step, open, term, left, end) are JSON lines in DIR/events.jsonl.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

from star import Gone, Star

CLIENT = pathlib.Path(__file__).resolve().parents[2] / "clients" / "python"
LEFT = 0


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--samples-per-epoch", type=int, default=1000)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="K", help="steps; 0: only when it leaves")
    parser.add_argument("--log", required=True, metavar="DIR")
    parser.add_argument("--timeout", type=float, default=60, help="for every wait for another rank, in seconds")
    parser.add_argument("--slow-load", type=float, default=0, metavar="S", help="sleep before connect()")
    parser.add_argument("--slow-save", type=float, default=0, metavar="S", help="rank 0 sleeps before it saves")
    parser.add_argument("--ignore-notice", action="store_true", help="connect, but never ask should_leave()")
    parser.add_argument("--no-client", action="store_true", help="import nothing; save and exit at SIGTERM")
    parser.add_argument("--ignore-term", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--escape", action="store_true", help="start a child in its own session that lives on")
    parser.add_argument("--open-gpu", default="", metavar="PATHS", help="open these files each step, commas between")
    parser.add_argument("--exit-code", type=int, help="exit with it at --exit-step")
    parser.add_argument("--exit-step", type=int, default=0)
    parser.add_argument("--exit-rank", type=int, help="only this rank; default all")
    return parser.parse_args()


class Events:
    """Appends to events.jsonl: one write per line, so that lines of many processes do not mix."""

    def __init__(self, directory, rank, size, generation):
        self._path = os.path.join(directory, "events.jsonl")
        self._same = {"pid": os.getpid(), "generation": generation, "rank": rank, "world": size}

    def log(self, event, **fields):
        line = json.dumps({"time": time.time(), "event": event, **self._same, **fields}) + "\n"
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.write(fd, line.encode())
        os.close(fd)


def samples_of(step, seed, per_epoch, batch):
    """The ids of a step, a pure function; the last batch of an epoch may be smaller."""
    steps_per_epoch = -(-per_epoch // batch)
    epoch, index = divmod(step, steps_per_epoch)
    order = list(range(per_epoch))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return order[index * batch : (index + 1) * batch]


def save(directory, step):
    """Steps done, atomically."""
    path = os.path.join(directory, "checkpoint.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def load(directory):
    """Steps done; 0 without a checkpoint."""
    try:
        with open(os.path.join(directory, "checkpoint.json"), encoding="utf-8") as file:
            return json.load(file)["step"]
    except FileNotFoundError:
        return 0


def escape(paths):
    """A grandchild in a session of its own that tries to keep the files open, for ten minutes at most."""
    code = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "print(os.getpid(), flush=True)\n"
        "os.close(1)\n"
        "until = time.time() + 600\n"
        "held = {}\n"
        "while time.time() < until:\n"
        "    for path in sys.argv[1:]:\n"
        "        try: held[path] = held.get(path) or os.open(path, os.O_RDWR)\n"
        "        except OSError: pass\n"
        "    time.sleep(0.5)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, *paths], stdout=subprocess.PIPE) as child:
        return int(child.stdout.readline())


class Opener:
    """Tries to open files; logs each change of the outcome."""

    def __init__(self, paths, events):
        self._paths, self._events, self._last = paths, events, {}

    def attempt(self, step):
        for path in self._paths:
            try:
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
                code = 0
            except OSError as error:
                code = error.errno
            if self._last.get(path) != code:
                self._last[path] = code
                self._events.log("open", path=path, errno=code, step=step)


class Trainer:
    """One rank."""

    def __init__(self, args):
        self.args = args
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.generation = int(os.environ.get("PLIANT_JOB_GENERATION", "0"))
        self.events = Events(args.log, self.rank, self.size, self.generation)
        self.term = False
        self.done = 0
        self.job = None

    def run(self):
        """The exit code."""
        args = self.args
        paths = [path for path in args.open_gpu.split(",") if path]
        self._start(paths)
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        try:
            star = Star(self.rank, self.size, address, port, args.timeout)
            mine = {"world": time.time_ns(), "step": load(args.checkpoint)}
            theirs = star.exchange(mine)
            start = mine if self.rank == 0 else theirs
            self.done = start["step"]
            return self._train(star, start["world"], Opener(paths, self.events))
        except Gone as error:
            return self._alone(error)

    def _start(self, paths):
        args = self.args
        for directory in (args.log, args.checkpoint):
            os.makedirs(directory, exist_ok=True)
        if args.ignore_term:
            signal.signal(signal.SIGTERM, lambda *_: self.events.log("term", ignored=True))
        elif args.no_client:
            signal.signal(signal.SIGTERM, self._on_term)
        env = os.environ
        self.events.log(
            "start",
            cuda=env.get("CUDA_VISIBLE_DEVICES"),
            node=env.get("SLURMD_NODENAME"),
            job=env.get("SLURM_JOB_ID"),
            step_id=env.get("SLURM_STEP_ID"),
            hold=env.get("PLIANT_JOB_HOLD") == "1",
            master=f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}",
        )
        if args.escape:
            self.events.log("escaped", child=escape(paths))
        time.sleep(args.slow_load)
        if not args.no_client:
            if CLIENT.is_dir():
                sys.path.insert(0, str(CLIENT))
            import pliant  # pylint: disable=import-outside-toplevel

            self.job = pliant.connect()
            self.events.log("connected", active=self.job.active)

    def _on_term(self, *_):
        self.term = True
        self.events.log("term", done=self.done)

    def _train(self, star, world, opener):
        args = self.args
        name = os.path.join(args.log, f"log-{self.generation}-{self.rank}.txt")
        if self.rank == 0:
            self._describe()
        with open(name, "a", encoding="ascii", buffering=1) as log:
            first = self.done
            while self.done < args.steps:
                if args.exit_code is not None and self.done >= args.exit_step and args.exit_rank in (None, self.rank):
                    self.events.log("end", code=args.exit_code)
                    return args.exit_code
                opener.attempt(self.done)
                ids = samples_of(self.done, args.seed, args.samples_per_epoch, args.global_batch)[self.rank :: self.size]
                time.sleep(args.step_seconds)
                log.write(f"{self.done} {world} {time.time_ns()} {' '.join(map(str, ids))}\n")
                star.exchange(self.done)
                self.done += 1
                if self.done == first + 1:
                    self.events.log("first_step", step=self.done)
                if self._leaves():
                    return LEFT
        self._save(force=True)
        self.events.log("end", code=0, step=self.done)
        return 0

    def _leaves(self):
        """After a step: report, save, and say whether to exit."""
        args = self.args
        if self.job is not None:
            self.job.report(
                step=self.done,
                total_steps=args.steps,
                samples=self.done * args.global_batch,
                loss=1 / (1 + self.done),
            )
        leave = self.term or (self.job is not None and not args.ignore_notice and self.job.should_leave())
        self._save(force=leave)
        if leave:
            self.events.log("left", step=self.done, by="term" if self.term else "notice")
        return leave

    def _save(self, force):
        every = self.args.checkpoint_every
        if self.rank == 0 and (force or (every and self.done % every == 0)):
            if force and self.args.slow_save:
                time.sleep(self.args.slow_save)
            save(self.args.checkpoint, self.done)

    def _describe(self):
        args = self.args
        path = os.path.join(args.log, "run.json")
        run = {"steps": args.steps, "samples_per_epoch": args.samples_per_epoch, "global_batch": args.global_batch}
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(run, file)
        os.replace(path + ".new", path)

    def _alone(self, error):
        """Another rank is gone. That is the way to leave where all ranks have got SIGTERM, else a failure."""
        until = time.monotonic() + 3
        while self.args.no_client and not self.term and time.monotonic() < until:
            time.sleep(0.05)
        if self.term:
            self._save(force=True)
            self.events.log("left", step=self.done, by="term")
            return LEFT
        self.events.log("end", code=1, error=str(error))
        print(f"steps.py: rank {self.rank}: another rank is gone: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(Trainer(arguments()).run())
