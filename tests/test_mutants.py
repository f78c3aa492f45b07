"""Each safety test of the engine, taken out: the scenario that is about it must notice.

A check that never fails proves nothing. Where a fault can only show without preload (numbers at the tail are given out again
only where no shared memory counts them, say), the mutant is played there. That each scenario holds without a mutant, both ways, is
test_faults' part.
"""

import pytest

from audit import scenarios
from audit.servers import server


@pytest.fixture(scope="module")
def cluster():
    yield from server(flavour="injection")


@pytest.fixture(scope="module")
def preload_cluster():
    yield from server(flavour="injection", preload=True)


CAUGHT_BY = {
    "own_claims": scenarios.own_claims_rolled_back,
    "own_segments": scenarios.own_segments_rolled_back,
    "segment_in_progress": scenarios.segment_in_progress,
    "claim_in_progress": scenarios.claim_in_progress,
    "frontier": scenarios.numbers_of_an_aborted_tail,
    "second_look": scenarios.second_look,
    "epoch_reserve": scenarios.seal_before_the_reservation,
    "epoch_claim": scenarios.seal_before_the_claim,
    "epoch_slot": scenarios.slot_gone_before_its_tables_are_locked,
    "epoch_empty": scenarios.caches_from_before_the_emptying,
    "straddle": scenarios.claim_across_a_border,
    "first_walk": scenarios.claim_across_the_end_of_a_first_walk,
    "low_mvcc": scenarios.older_segment_open_at_the_emptying,
}

# Those whose fault does not need per-session caches.
ALSO_PRELOADED = ("own_claims", "segment_in_progress", "claim_in_progress", "second_look", "epoch_claim", "epoch_slot")


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_the_mutant_is_caught(db, mutant):
    assert CAUGHT_BY[mutant](db, mutant), f"nothing noticed that {mutant} is missing"


@pytest.mark.parametrize("mutant", ALSO_PRELOADED)
def test_the_mutant_is_caught_preloaded(preload_db, mutant):
    assert CAUGHT_BY[mutant](preload_db, mutant), f"nothing noticed that {mutant} is missing"
