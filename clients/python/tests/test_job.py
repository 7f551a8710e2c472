"""A training process against an agent: in this process where it can be, in a child where the process matters."""

import fractions
import os
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

from pliant import _agreement, _job
from pliant._job import Job
from pliant._world import World, read_world

from .agent import Agent

WORLD = World(1, 4, 1, 2, 3, "10.0.0.1", 2950)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def child(text: str, agent=None, **env: str) -> "subprocess.Popen[str]":
    """Runs a script as a rank."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PLIANT_")}
    environ.update(PYTHONPATH=ROOT, RANK="1", WORLD_SIZE="2", PLIANT_JOB_GENERATION="5", **env)
    if agent is not None:
        environ["PLIANT_JOB_SOCKET"] = agent.path
    command = [sys.executable, "-c", text]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class InProcess(unittest.TestCase):
    def setUp(self):
        self.agent = Agent()
        self.addCleanup(self.agent.close)
        self.job = Job(WORLD, self.agent.path)
        self.job._open(hold=False)
        self.addCleanup(self.job._close)

    def test_hello_and_first_step(self):
        self.assertTrue(self.job.active)
        hello = self.agent.hellos[0]
        self.assertEqual((hello["role"], hello["rank"], hello["generation"], hello["version"]), ("client", 1, 3, 1))
        self.assertFalse(self.job.should_leave())
        self.agent.next("stepped", 2)

    def test_the_first_report_counts_as_a_step_too(self):
        self.job.report(step=1)
        self.agent.next("stepped", 2)

    def test_reports_are_merged_and_bad_values_dropped(self):
        self.job.report(step=5, total_steps=100.0, samples="many", loss=float("nan"))
        self.job.report(loss=0.5, accuracy=object())
        report = self.agent.next("report")
        while "loss" not in report:
            report = self.agent.next("report")
        self.assertEqual(report, {"type": "client", "say": "report", "step": 5, "total_steps": 100, "loss": 0.5})
        self.job.report(step=-1, total_steps=True, samples=1 << 64, loss=float("inf"))
        self.job.report(step=6.5, loss=[1.0])
        self.job.report(step=7, loss=fractions.Fraction(1, 4))
        while report.get("step") != 7:
            report = self.agent.next("report")
        self.assertEqual((report["total_steps"], report["loss"]), (100, 0.25))
        self.assertNotIn("samples", report)

    def test_reports_are_few(self):
        until = time.monotonic() + 1
        while time.monotonic() < until:
            self.job.report(step=int(time.monotonic() * 1000))
        time.sleep(0.3)
        reports = [m for m in list(self.agent.heard.queue) if m["say"] == "report"]
        self.assertLessEqual(len(reports), 8)

    def test_vote_commit_left(self):
        self.job.should_leave()
        self.agent.tell("propose", boundary=2, grace=60, reason="test")
        vote = self.agent.next("vote")
        self.assertEqual((vote["boundary"], vote["accept"], vote["passed"]), (2, True, 1))
        threading.Timer(0.1, lambda: self.agent.tell("commit", boundary=2)).start()
        self.assertTrue(self.job.should_leave())
        self.assertEqual(self.agent.next("left", 2)["boundary"], 2)
        self.assertTrue(self.job.should_leave())

    def test_the_vote_does_not_need_the_training_thread(self):
        for _ in range(3):
            self.job.should_leave()
        self.agent.tell("propose", boundary=3, grace=60, reason="test")
        self.assertFalse(self.agent.next("vote", 2)["accept"])

    def test_reconnects_and_says_again_what_holds(self):
        self.job.should_leave()
        self.agent.next("stepped")
        self.agent.hang_up()
        self.agent.wait_hellos(2)
        self.agent.next("stepped")
        self.agent.tell("propose", boundary=2, grace=60, reason="test")
        self.assertTrue(self.agent.next("vote")["accept"])

    def test_another_agent_on_the_same_path(self):
        self.agent.close()
        self.job.should_leave()
        again = Agent(self.agent.directory)
        self.addCleanup(again.close)
        again.wait_hellos(1)
        again.next("stepped")

    def test_a_commit_over_a_new_connection(self):
        self.agent.tell("propose", boundary=1, grace=60, reason="test")
        self.agent.next("vote")
        self.agent.hang_up()

        def later():
            self.agent.wait_hellos(2)
            time.sleep(0.2)
            self.agent.tell("commit", boundary=1)

        threading.Thread(target=later, daemon=True).start()
        self.assertTrue(self.job.should_leave())
        self.assertEqual(self.agent.next("left")["boundary"], 1)

    def test_an_agent_that_talks_nonsense_is_left_and_tried_again(self):
        for number, bad in enumerate((b"nonsense", b"[]"), start=2):
            self.agent.raw(bad)
            self.agent.wait_hellos(number)
            time.sleep(0.1)
        self.agent.raw({"type": "client", "say": "propose", "boundary": "x"})
        self.agent.raw({"type": "client", "say": "of the future"})
        self.agent.raw({"type": "future"})
        self.agent.tell("propose", boundary=4, grace=1, reason="")
        self.assertEqual(self.agent.next("vote")["boundary"], 4)
        self.assertEqual(len(self.agent.hellos), 3)

    def test_no_decision(self):
        with mock.patch.object(_agreement, "PROMISE_SECONDS", 0.2), mock.patch.object(_job, "warn") as warn:
            self.agent.tell("propose", boundary=1, grace=60, reason="test")
            self.agent.next("vote")
            self.assertFalse(self.job.should_leave())
        self.assertIn("no decision", warn.call_args[0][0])


class Environment(unittest.TestCase):
    def test_world(self):
        env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n7"}
        world = read_world({**env, "MASTER_PORT": "29", "PLIANT_JOB_GENERATION": "4"})
        self.assertEqual(world, World(3, 8, 1, 2, 4, "n7", 29))
        self.assertEqual(read_world({}), World(0, 1, 0, 1, 0, "127.0.0.1", 0))
        self.assertEqual(read_world({"RANK": "x", "WORLD_SIZE": "0", "LOCAL_RANK": "-2"}), read_world({}))


class Processes(unittest.TestCase):
    def end(self, process, seconds=20):
        out, err = process.communicate(timeout=seconds)
        self.assertEqual(process.returncode, 0, err)
        return out.strip(), err

    def test_outside(self):
        text = (
            "import pliant; j = pliant.connect(); j.report(step=1, loss=2.0, x=object());"
            "print(j.active, j.should_leave(), j.world.size, j is pliant.connect())"
        )
        self.assertEqual(self.end(child(text)), ("False False 2 True", ""))

    def test_no_agent(self):
        text = "import pliant; j = pliant.connect(); j.report(step=1); print(j.active, j.should_leave())"
        out, err = self.end(child(text, PLIANT_JOB_SOCKET="/nonexistent/agent.sock"))
        self.assertEqual(out, "False False")
        self.assertEqual(err.count("\n"), 1, err)
        self.assertTrue(err.startswith("pliant: no connection to the agent at /nonexistent/agent.sock: No such file"), err)

    def test_paths_that_cannot_be(self):
        text = "import pliant; print(pliant.connect().should_leave())"
        for path in ("x" * 300, "/", "/dev/null"):
            out, err = self.end(child(text, PLIANT_JOB_SOCKET=path))
            self.assertEqual((out, err.count("\n")), ("False", 1), err)

    def test_refused_and_other_version(self):
        text = "import pliant; j = pliant.connect(); print(j.active, j.should_leave())"
        answers = {
            "not of this job": {"type": "refused", "reason": "not of this job"},
            "version 2": {"type": "welcome", "version": 2, "job": 1, "node": "n"},
            "no answer to Hello": {"type": "order"},
        }
        for expected, answer in answers.items():
            agent = Agent(answer=answer)
            self.addCleanup(agent.close)
            out, err = self.end(child(text, agent))
            self.assertEqual((out, err.count("\n")), ("False False", 1), err)
            self.assertIn(expected, err)

    def test_an_agent_that_does_not_answer(self):
        agent = Agent()
        self.addCleanup(agent.close)
        agent.mute = True
        out, err = self.end(child("import pliant; print(pliant.connect().active)", agent))
        self.assertEqual(out, "False")
        self.assertIn("did not answer in 5 s", err)

    def test_hold(self):
        agent = Agent()
        self.addCleanup(agent.close)
        process = child("import pliant; print(pliant.connect().active)", agent, PLIANT_JOB_HOLD="1")
        agent.wait_hellos(1)
        with self.assertRaises(subprocess.TimeoutExpired):
            process.wait(0.5)
        agent.hang_up()
        agent.wait_hellos(2)
        time.sleep(0.1)
        agent.tell("start")
        agent.tell("start")
        self.assertEqual(self.end(process), ("True", ""))

    def test_hold_without_agent(self):
        text = "import pliant, pliant._job as j; j.HOLD_SECONDS = 0.5; print('loaded'); pliant.connect(); print('trains')"
        process = child(text, PLIANT_JOB_SOCKET="/nonexistent", PLIANT_JOB_HOLD="1")
        out, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, out), (_job.HOLD_EXIT, "loaded\n"), err)
        self.assertIn("no word to start: ending with code 75", err)

    def test_the_last_report_is_sent_before_the_process_ends(self):
        agent = Agent()
        self.addCleanup(agent.close)
        text = "import pliant; j = pliant.connect(); j.should_leave(); j.report(step=9, samples=90)"
        self.end(child(text, agent))
        self.assertEqual(agent.next("report")["samples"], 90)

    def test_forked_and_spawned_children_are_no_ranks(self):
        agent = Agent()
        self.addCleanup(agent.close)
        text = """
import os, subprocess, sys, pliant
j = pliant.connect()
j.should_leave()
pid = os.fork()
if pid == 0:
    j.report(step=99)
    k = pliant.connect()
    print("child", j.active, j.should_leave(), k.active, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
code = "import pliant; print('spawned', pliant.connect().active)"
subprocess.run([sys.executable, "-c", code], check=True)
print("parent", j.active)
j.report(step=1)
"""
        out, err = self.end(child(text, agent))
        self.assertEqual(out.splitlines(), ["child False False False", "spawned False", "parent True"], err)
        self.assertEqual(len(agent.hellos), 1)
        self.assertEqual(agent.next("report")["step"], 1)

    def test_a_child_that_lives_on_does_not_keep_the_connection(self):
        agent = Agent()
        self.addCleanup(agent.close)
        text = """
import os, sys, time, pliant
j = pliant.connect()
if os.fork() == 0:
    for fd in (1, 2):
        os.close(fd)
    time.sleep(3)
    os._exit(0)
time.sleep(0.2)
os._exit(0)
"""
        self.end(child(text, agent))
        connection = agent._connections[0]
        connection.settimeout(2)
        self.assertEqual(connection.recv(1), b"")


class Cost(unittest.TestCase):
    """Printed, not judged: machines differ. The limit of 50 us is checked by the bench."""

    def measure(self, job, text):
        times, clock = [], time.perf_counter_ns
        for step in range(20_000):
            before = clock()
            job.report(step=step, total_steps=20_000, samples=step * 8, loss=1.5)
            times.append(clock() - before)
        calls = 200_000
        before = clock()
        for _ in range(calls):
            job.should_leave()
        each = (clock() - before) / calls
        times.sort()
        print(
            f"report, {text}: median {times[10_000] / 1000:.2f} us, p99 {times[19_800] / 1000:.2f} us, "
            f"most {times[-1] / 1000:.0f} us; should_leave {each:.0f} ns",
            file=sys.stderr,
        )

    def test_cost(self):
        self.measure(Job(WORLD), "outside")
        agent = Agent()
        job = Job(WORLD, agent.path)
        job._open(hold=False)
        self.measure(job, "agent alive")
        agent.close()
        self.measure(job, "agent dead")
        job._close()


if __name__ == "__main__":
    unittest.main()
