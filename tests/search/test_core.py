"""The compiled core against the same costs in plain Python."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from shardfx import chips, topology
from shardfx.auto import _core as core
from shardfx.auto._core import CostModel, find, machine_of, shares
from shardfx.auto._terms import Terms
from shardfx.chips._links import extents_of


def random_terms(seed, assignments=5, rows=12, few=3, classes=4):
    rng = np.random.default_rng(seed)
    return Terms(
        divides=rng.random((rows, assignments)) < 0.5,
        shared=rng.integers(0, (10**15, 10**12, 10**10), (rows, 3)).astype(float),
        divides_sent=rng.random((assignments, few, assignments)) < 0.5,
        sent=rng.integers(0, 10**10, (assignments, few, 2)).astype(float),
        calls=rng.integers(0, 100, assignments).astype(float),
        limits=rng.random((classes, assignments)) < 0.4,
        sizes=np.array([64, 48, 96, 30][:classes], np.int32),
        after=np.zeros((assignments, classes), bool),
        classes=tuple(range(classes)),
        least=np.ones(classes, np.int32),
    )


def by_hand(terms, chip, model, assignments, sizes, total):
    """Seconds and bytes of one candidate on a torus."""

    def divided(mask):
        return math.prod(size for assignment, size in zip(assignments, sizes, strict=True) if mask[assignment])

    local = [1 / divided(mask) for mask in terms.divides]
    compute = max(
        float(terms.shared[:, 0] @ local) / (chip.flops("bfloat16") * model.compute),
        float(terms.shared[:, 1] @ local) / (chip.hbm_bytes_per_second * model.memory),
    )
    memory = float(terms.shared[:, 2] @ local)
    exposed = hidden = 0.0
    extents = extents_of(chip, total)
    ways = [1 + ring for ring, size in zip(topology.wraps(chip.kinds[0], extents), extents, strict=True) if size > 1]
    rings = sum(ways) / len(ways)
    for assignment, size in zip(assignments, sizes, strict=True):
        links = max(0.5, chip.torus_dims * math.log2(size) / math.log2(total)) * rings
        per_byte = (1 - 1 / size) / (chip.link_bytes_per_second * model.network * links)
        for mask, (full, beside) in zip(terms.divides_sent[assignment], terms.sent[assignment], strict=True):
            exposed += full / divided(mask) * per_byte
            hidden += beside / divided(mask) * per_byte
        exposed += terms.calls[assignment] * model.call_seconds
    return compute + exposed + max(0.0, hidden - model.overlap * compute), memory


def allowed(terms, assignments, sizes):
    for row, size in enumerate(terms.sizes):
        cut = math.prod(s for assignment, s in zip(assignments, sizes, strict=True) if terms.limits[row, assignment])
        if size % cut or cut < terms.least[row]:
            return False
    return True


def all_by_hand(terms, chip, model, devices, limit):
    found = {}
    for count in range(1, 5):
        for assignments in itertools.combinations(range(terms.divides.shape[1]), count):
            for sizes in shares(devices, count).tolist():
                seconds, memory = by_hand(terms, chip, model, assignments, sizes, devices)
                if allowed(terms, assignments, sizes) and memory <= limit:
                    found[assignments, tuple(sizes)] = seconds
    return found


@pytest.mark.parametrize("devices", [2, 6, 16, 64, 96])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["v5e", "v5p"])
def test_the_best_is_the_best_of_all(devices, seed, name):
    chip, model, terms = chips.find(name), CostModel(), random_terms(seed)
    expected = all_by_hand(terms, chip, model, devices, 1e10)
    found = find(terms, machine_of(chip, devices, model, "bfloat16", 1e10), devices)
    assert bool(found) == bool(expected)
    for one in found:
        assert one.seconds == pytest.approx(expected[one.assignments, one.sizes], rel=1e-4)
    if found:
        assert found[0].seconds == pytest.approx(min(expected.values()), rel=1e-4)


def test_least_pieces_and_what_must_be_cut_before():
    chip, model = chips.find("v5e"), CostModel()
    terms = dataclasses.replace(random_terms(0), least=np.array([4, 1, 1, 1], np.int32))
    found = find(terms, machine_of(chip, 16, model, "bfloat16", 1e12), 16)
    assert found
    for one in found:
        assert allowed(terms, one.assignments, one.sizes)
    after = np.zeros((5, 4), bool)
    after[:, 3] = True  # 30 elements are never cut wholly by 16 devices
    none = find(dataclasses.replace(terms, after=after), machine_of(chip, 16, model, "bfloat16", 1e12), 16)
    assert not none


def test_shares_are_all_ordered_factorizations():
    assert shares(8, 1).tolist() == [[8]] and shares(8, 2).tolist() == [[2, 4], [4, 2]]
    assert shares(7, 2).tolist() == [] and shares(12, 3).tolist() == [[2, 2, 3], [2, 3, 2], [3, 2, 2]]
    for devices, axes in itertools.product((6, 30, 64), (2, 3, 4)):
        every = itertools.product(range(2, devices), repeat=axes)
        assert shares(devices, axes).tolist() == [list(s) for s in every if math.prod(s) == devices][: 10**6]


def test_what_fits_into_an_island_takes_its_switch():
    """64 H100 in islands of 8: what fits into an island takes the switch, what does not the network cards."""
    chip, model, terms = chips.find("h100"), CostModel(), random_terms(1)
    found = find(terms, machine_of(chip, 64, model, "bfloat16", 1e12), 64)
    apart = dataclasses.replace(chip, island_chips=1)
    slower = find(terms, machine_of(apart, 64, model, "bfloat16", 1e12), 64)
    joined = dataclasses.replace(chip, island_chips=64)
    faster = find(terms, machine_of(joined, 64, model, "bfloat16", 1e12), 64)
    assert faster[0].seconds <= found[0].seconds <= slower[0].seconds
    assert faster[0].seconds < slower[0].seconds


def test_slices_cost_what_the_network_between_them_does():
    chip, model, terms = chips.find("v5p"), CostModel(), random_terms(2)
    machine = machine_of(chip, 64, model, "bfloat16", 1e12)
    one = find(terms, machine, 64)
    two = find(terms, machine, 64, slices=2)
    assert two[0].seconds >= one[0].seconds and all(math.prod(made.slices) == 2 for made in two)


def test_where_there_are_too_many_candidates_the_last_assignments_are_left_out(monkeypatch):
    monkeypatch.setattr(core, "_ALL", 2000)
    machine = machine_of(chips.find("v5p"), 64, CostModel(), "bfloat16", 1e12)
    used = {assignment for one in find(random_terms(0, assignments=24), machine, 64) for assignment in one.assignments}
    assert 1 < max(used) < 12
