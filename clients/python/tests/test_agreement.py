"""The two-phase agreement, without a socket."""

import threading
import time
import unittest
from unittest import mock

from pliant import _agreement
from pliant._agreement import Agreement


def call(agreement: Agreement) -> bool:
    """What Job.should_leave() does."""
    agreement.calls = number = agreement.calls + 1
    return agreement.attend(number) if agreement.attention else False


class Waiter:
    """One call in a thread of its own."""

    def __init__(self, agreement: Agreement) -> None:
        self.result = None
        self.thread = threading.Thread(target=self._run, args=(agreement,), daemon=True)
        self.thread.start()

    def _run(self, agreement: Agreement) -> None:
        self.result = call(agreement)

    def end(self):
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.result

    def still_waits(self) -> bool:
        self.thread.join(0.1)
        return self.thread.is_alive()


class Boundaries(unittest.TestCase):
    def setUp(self):
        self.agreement = Agreement()

    def test_all_goes_well(self):
        self.assertFalse(call(self.agreement))
        self.assertEqual(self.agreement.propose(3), (True, 1))
        self.agreement.commit(3)
        self.assertEqual([call(self.agreement) for _ in range(3)], [False, True, True])
        self.assertEqual(self.agreement.left, 3)

    def test_accepts_only_what_is_ahead(self):
        for _ in range(4):
            call(self.agreement)
        self.assertEqual(self.agreement.propose(4), (False, 4))
        self.assertFalse(call(self.agreement))
        self.assertEqual(self.agreement.propose(6), (True, 5))

    def test_the_promised_call_waits_for_the_commit(self):
        self.agreement.propose(1)
        waiter = Waiter(self.agreement)
        self.assertTrue(waiter.still_waits())
        self.agreement.commit(1)
        self.assertTrue(waiter.end())

    def test_the_promised_call_goes_on_after_an_abort(self):
        self.agreement.propose(1)
        waiter = Waiter(self.agreement)
        self.assertTrue(waiter.still_waits())
        self.agreement.abort(1)
        self.assertFalse(waiter.end())
        self.assertEqual(self.agreement.propose(2), (True, 1))

    def test_an_abort_of_another_boundary_is_none(self):
        self.agreement.propose(1)
        waiter = Waiter(self.agreement)
        self.agreement.abort(9)
        self.assertTrue(waiter.still_waits())
        self.agreement.commit(1)
        self.assertTrue(waiter.end())

    def test_a_proposal_repeated_while_the_call_waits_keeps_the_promise(self):
        self.agreement.propose(1)
        waiter = Waiter(self.agreement)
        self.assertTrue(waiter.still_waits())
        self.assertEqual(self.agreement.propose(1), (True, 0))
        self.assertTrue(waiter.still_waits())
        self.agreement.commit(1)
        self.assertTrue(waiter.end())

    def test_a_later_proposal_takes_the_place_of_one_whose_abort_was_lost(self):
        self.agreement.propose(1)
        waiter = Waiter(self.agreement)
        self.assertTrue(waiter.still_waits())
        self.assertEqual(self.agreement.propose(2), (True, 0))
        self.assertFalse(waiter.end())
        self.agreement.commit(2)
        self.assertTrue(call(self.agreement))

    def test_without_a_decision_training_goes_on_and_a_late_commit_counts_at_the_next_call(self):
        with mock.patch.object(_agreement, "PROMISE_SECONDS", 0.1):
            self.agreement.propose(1)
            self.assertFalse(call(self.agreement))
        self.assertEqual(self.agreement.timed_out, 1)
        self.assertEqual(self.agreement.propose(1), (False, 1))
        self.assertFalse(call(self.agreement))
        self.agreement.commit(1)
        self.assertTrue(call(self.agreement))
        self.assertEqual(self.agreement.left, 3)

    def test_a_commit_is_final(self):
        self.agreement.propose(2)
        self.agreement.commit(2)
        self.agreement.abort(2)
        self.assertEqual(self.agreement.propose(5), (False, 0))
        self.assertEqual(self.agreement.propose(2), (True, 0))
        self.assertEqual([call(self.agreement) for _ in range(2)], [False, True])
        self.assertEqual(self.agreement.propose(2), (True, 2))

    def test_a_call_is_as_cheap_again_after_an_abort(self):
        call(self.agreement)
        self.agreement.propose(9)
        self.agreement.abort(9)
        call(self.agreement)
        self.assertFalse(self.agreement.attention)


class Races(unittest.TestCase):
    """Ranks that run freely and a coordinator: all leave at the same call."""

    def coordinate(self, ranks, margin):
        boundary = 2
        while True:
            votes = [rank.propose(boundary) for rank in ranks]
            if all(accepted for accepted, _ in votes):
                for rank in ranks:
                    rank.commit(boundary)
                return
            for rank in ranks:
                rank.abort(boundary)
            boundary = max(passed for _, passed in votes) + margin

    def test_free_running_ranks_leave_together(self):
        for round_number in range(30):
            ranks = [Agreement() for _ in range(4)]
            left = []

            def train(rank, left=left):
                while not call(rank):
                    pass
                left.append(rank.left)

            threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in ranks]
            for thread in threads:
                thread.start()
            time.sleep(0.001 * (round_number % 5))
            self.coordinate(ranks, 1 + round_number * 1000)
            for thread in threads:
                thread.join(20)
            self.assertEqual(len(left), 4)
            self.assertEqual(len(set(left)), 1, left)


if __name__ == "__main__":
    unittest.main()
