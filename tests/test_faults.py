"""Faults of the design's prototypes and of this engine's first versions, each as a directed test that runs without preload and
with it."""

import pytest

from audit import scenarios
from audit.servers import server


@pytest.fixture(scope="module")
def cluster():
    yield from server(flavour="injection")


@pytest.fixture(scope="module")
def preload_cluster():
    yield from server(flavour="injection", preload=True)


SCENARIOS = [
    scenarios.own_claims_rolled_back,
    scenarios.own_segments_rolled_back,
    scenarios.own_jobs_of_a_savepoint,
    scenarios.own_jobs_in_one_statement,
    scenarios.segment_in_progress,
    scenarios.claim_in_progress,
    scenarios.numbers_of_an_aborted_tail,
    scenarios.numbers_given_out_again,
    scenarios.full_list_beside_a_tail,
    scenarios.claim_across_a_border,
    scenarios.hole_before_a_long_claim,
    scenarios.second_look,
    scenarios.seal_before_the_reservation,
    scenarios.seal_before_the_claim,
    scenarios.slot_gone_before_its_tables_are_locked,
    scenarios.caches_from_before_the_emptying,
    scenarios.older_segment_open_at_the_emptying,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_scenario(any_db, scenario):
    assert scenario(any_db) == []
