"""The estimate of candidates against the same costs in plain Python."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from shardfx import MeshSpec, chips, topology
from shardfx.auto import _core as core, search
from shardfx.auto._programs import with_traffic
from shardfx.chips import _chip
from shardfx.cost import Traffic, TrafficRow


MODEL = core.CostModel()


def random_terms(seed, assignments=5, rows=12, few=3):
    rng = np.random.default_rng(seed)
    values = np.array([64, 48, 96, 30])
    return {
        "divides": rng.random((rows, assignments)) < 0.5,
        "shared": rng.integers(0, (10**15, 10**12, 10**10), (rows, 3)).astype(float),
        "divides_sent": rng.random((assignments, few, assignments)) < 0.5,
        "sent": rng.integers(0, 10**10, (assignments, few, 2)).astype(float),
        "calls": rng.integers(0, 100, assignments).astype(float),
        "limits": rng.random((4, assignments)) < 0.4,
        "sizes": values,
        "least": np.ones(4, int),
    }


def machine(chip, devices, limit=1e12):
    return core.rates_of(chips.find(chip), devices, MODEL, limit)


def by_hand(terms, chip, assignments, sizes, total):
    """Seconds and bytes of one candidate on a torus."""

    shares = [1 / cut_by(mask, assignments, sizes) for mask in terms["divides"]]
    flops, moved_bytes, memory = terms["shared"].T @ shares
    compute = max(
        flops / (chip.flops("bfloat16") * MODEL.compute),
        moved_bytes / (chip.hbm_bytes_per_second * MODEL.memory),
    )
    extents = _chip.extents_of(chip, total)
    links_of_dims = []
    slice_hops = 0
    are_rings = topology.wraps(chip.kinds[0], extents)
    for is_ring, size in zip(are_rings, extents, strict=True):
        if size > 1:
            links_of_dims.append(1 + is_ring)
        if is_ring:
            slice_hops += size // 2
        else:
            slice_hops += size - 1
    mean_links = sum(links_of_dims) / len(links_of_dims)

    exposed = 0.0
    hidden = 0.0
    for assignment, size in zip(assignments, sizes, strict=True):
        share_of_dims = math.log2(size) / math.log2(total)
        links = mean_links * max(0.5, chip.torus_dims * share_of_dims)
        bytes_per_second = chip.link_bytes_per_second * MODEL.network * links
        per_byte = (1 - 1 / size) / bytes_per_second
        masks = terms["divides_sent"][assignment]
        for mask, sent in zip(masks, terms["sent"][assignment], strict=True):
            exposed_bytes, hidden_bytes = sent
            cut = cut_by(mask, assignments, sizes)
            exposed += exposed_bytes / cut * per_byte
            hidden += hidden_bytes / cut * per_byte
        hops = max(1, slice_hops * share_of_dims)
        exposed += terms["calls"][assignment] * hops * chip.hop_seconds
    seconds = compute + exposed + max(0.0, hidden - MODEL.overlap * compute)
    return seconds, memory


def cut_by(mask, assignments, sizes):
    """In how many parts the assignments of a mask cut."""
    cut = 1
    for assignment, size in zip(assignments, sizes, strict=True):
        if mask[assignment]:
            cut *= size
    return cut


def is_allowed(terms, assignments, sizes):
    columns = (terms["limits"], terms["sizes"], terms["least"])
    for mask, size, least in zip(*columns, strict=True):
        cut = cut_by(mask, assignments, sizes)
        if size % cut != 0 or cut < least:
            return False
    return True


@pytest.mark.parametrize("devices", [2, 6, 64, 96])
@pytest.mark.parametrize("name", ["v5e", "v5p"])
@pytest.mark.parametrize("seed", range(2))
def test_the_best_is_the_best_of_all(devices, seed, name):
    values = np.array([1 + 3 * seed, 1, 1, 1])
    terms = {**random_terms(seed), "least": values}
    expected = {}
    divisors = [size for size in range(2, devices + 1) if devices % size == 0]
    for count in range(1, 5):
        shares = [
            sizes
            for sizes in itertools.product(divisors, repeat=count)
            if math.prod(sizes) == devices
        ]
        for assignments in itertools.combinations(range(5), count):
            for sizes in shares:
                seconds, memory = by_hand(
                    terms,
                    chip=chips.find(name),
                    assignments=assignments,
                    sizes=sizes,
                    total=devices,
                )
                if is_allowed(terms, assignments, sizes) and memory <= 1e10:
                    expected[assignments, sizes] = seconds
    candidates = core.find(terms, machine(name, devices, 1e10), devices)
    assert bool(candidates) == bool(expected)
    for candidate in candidates:
        expected_seconds = expected[candidate.assignments, candidate.sizes]
        assert candidate.seconds == pytest.approx(expected_seconds, rel=1e-4)
    if candidates:
        least_seconds = min(expected.values())
        assert candidates[0].seconds == pytest.approx(least_seconds, rel=1e-4)


def test_what_fits_into_an_island_takes_its_switch():
    """64 H100 in islands of 8: what fits into an island takes the switch, what does not
    the network cards.
    """
    chip = chips.find("h100")
    terms = random_terms(1)

    def seconds_of_best(island_chips):
        islands = dataclasses.replace(chip, island_chips=island_chips)
        best, *_ = core.find(terms, machine(islands, 64), 64)
        return best.seconds

    one_island = seconds_of_best(64)
    no_islands = seconds_of_best(1)
    assert one_island <= seconds_of_best(chip.island_chips) <= no_islands
    assert one_island < no_islands


def test_slices_cost_what_the_network_between_them_does():
    terms = random_terms(2)
    one_slice = core.find(terms, machine("v5p", 64), 64, slices=1)
    two_slices = core.find(terms, machine("v5p", 64), 64, slices=2)
    assert two_slices[0].seconds >= one_slice[0].seconds
    for candidate in two_slices:
        assert math.prod(candidate.slices) == 2


def test_too_many_candidates_lose_the_last_assignments(monkeypatch):
    monkeypatch.setattr(core, "_MOST_CANDIDATES", 2000)
    candidates = core.find(random_terms(0, assignments=24), machine("v5p", 64), 64)
    limit = max(max(candidate.assignments) for candidate in candidates)
    assert 1 < limit < 12


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("v5e", (16, 16)),
        ("v5e", (256,)),
        ("v5p", (4, 16)),
        ("v5p", (4, 4, 4)),
        ("v5e", (4, 4)),
        ("h100", (4, 8)),
    ],
)
def test_hops_are_those_that_seconds_counts(name, sizes):
    """Axes that span whole dimensions of a slice."""
    chip = chips.find(name)
    devices = math.prod(sizes)
    rates = core.rates_of(chip, devices, MODEL, 1e12)
    rows = np.array([sizes])
    [hops] = core.hop_counts(rates, rows, np.ones_like(rows)).T.tolist()
    names = [str(axis) for axis in range(len(sizes))]
    rings = {}
    if chip.torus_dims:
        extents = _chip.extents_of(chip, devices)
        rings = _chip.axes_on(chip, extents, dict(zip(names, sizes, strict=True)))
    expected = [max(1, _chip.hops_across(rings.get(axis, ()))) for axis in names]
    assert hops == pytest.approx(expected)
    assert rates["hop_seconds"] == np.float32(chip.hop_seconds)


def test_an_axis_of_one_device_has_no_hops():
    rows = np.array([[1, 64]])
    rates = machine("v5p", 64)
    [[none], [all_hops]] = core.hop_counts(rates, rows, np.ones_like(rows))
    assert none == 0
    assert all_hops == 6


def reduced(*leaves):
    rows = []
    for leaf in leaves:
        row = TrafficRow(
            kind="all-reduce",
            wire_bytes=1000,
            dcn_bytes=0,
            calls=1,
            dtype="f32",
            group_size=8,
            axes=("data",),
            source=None,
            stack=(),
            leaf=leaf,
        )
        rows.append(row)
    return Traffic(rows=tuple(rows), devices=8, axes=("data",))


def test_reductions_of_gradients_take_their_latency_once():
    model = (lambda w, x: (x @ w).sum(), jnp.ones((8, 8)), jnp.ones((16, 8)))
    candidate, *_ = search(*model, devices=8, chip="v5e", keep=1, effort="least")
    candidate = dataclasses.replace(candidate, mesh=MeshSpec({"data": 8}))
    chip = chips.find("v5e")
    traffics = reduced("w"), reduced("w", "b"), reduced(None), reduced(None, None)
    timed = [with_traffic(candidate, sent, chip, MODEL) for sent in traffics]
    # A slice of 2 x 4 chips has no rings: 1 and 3 hops, there and back.
    latency = 8 * chip.hop_seconds
    seconds_of_bytes = timed[0].hidden_seconds - latency
    assert seconds_of_bytes > 0
    assert timed[1].hidden_seconds == pytest.approx(latency + 2 * seconds_of_bytes)
    assert timed[2].exposed_seconds == pytest.approx(timed[0].hidden_seconds)
    assert timed[3].exposed_seconds == pytest.approx(2 * timed[2].exposed_seconds)


def test_axes_in_one_dimension_have_the_hops_of_all_together():
    rings = _chip.axes_on(chips.find("v5e"), (2, 4), {"a": 2, "b": 2, "c": 2})
    assert sum(_chip.hops_across(rings[axis]) for axis in "abc") == 1 + 3
    assert _chip.hops_across(rings["a"]) + _chip.hops_across(rings["b"]) == 3
