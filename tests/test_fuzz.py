"""Random steps of several sessions against a model, see audit/fuzz.py; and with calls that are held half-way while others go on,
see audit/interleave.py. A failure names its seed:

    PYTHONPATH=tests python -m audit.fuzz SEED
    PYTHONPATH=tests python -m audit.interleave SEED
"""

import os

import pytest

from audit import fuzz, interleave
from audit.servers import server

# More of them: AWA_FUZZ_SEEDS=1-1000
SEEDS = list(fuzz.seeds(os.environ.get("AWA_FUZZ_SEEDS", "1-12").split()))


@pytest.fixture(scope="module")
def cluster():
    yield from server(flavour="injection")


@pytest.fixture(scope="module")
def preload_cluster():
    yield from server(flavour="injection", preload=True)


@pytest.fixture(scope="module")
def crowded_cluster():
    """Shared memory for one lane: the others go by the index and by the sessions' own lists."""
    yield from server(flavour="injection", preload=True, settings={"awa_queue.shared_lanes": "1"})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["cluster", "preload_cluster", "crowded_cluster"])
def test_random_steps(request, kind):
    db = request.getfixturevalue(kind).database()
    for seed in SEEDS if kind != "crowded_cluster" else SEEDS[: len(SEEDS) // 4]:
        done = fuzz.play(db, seed)
        assert done["claimed"] and done["ended"], done


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["cluster", "preload_cluster"])
def test_calls_held_half_way(request, kind):
    db = request.getfixturevalue(kind).database()
    held = 0
    for seed in SEEDS[: len(SEEDS) // 3]:
        held += interleave.play(db, seed)["held"]
    assert held > 50 * (len(SEEDS) // 3), "hardly any call was held"


def test_the_model_notices_a_fault(cluster):
    """Without the test for own claims the fuzz must find something, or it proves nothing."""
    db = cluster.database()
    db.sql(f'ALTER DATABASE "{db.name}" SET awa_queue.mutant = \'own_claims\'')
    with pytest.raises(fuzz.Fault):
        for seed in range(1, 11):
            fuzz.play(db, seed)
