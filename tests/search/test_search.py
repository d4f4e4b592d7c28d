from typing import Any

import jax
import jax.numpy as jnp
import odd_models
import pytest
from models import MODELS, Struct, f32, mlp_step, space_of
from parts_of_search import by_hand, fastest, named_classes, trace

from shardfx import MeshSpec
from shardfx.auto import Limits, search
from shardfx.auto._layouts import Layouts
from shardfx.errors import ProgramError, RuleError


def sent_under(names, *model):
    """What an axis of this assignment sends: pairs of a collective and a shape, in
    order.
    """
    classes = named_classes(trace(*model))
    layouts = Layouts(classes, 8)
    number_by_name = {
        group.name: number for number, group in enumerate(classes.axes) if group.roots
    }
    layout = layouts.under(tuple(number_by_name[name] for name in names))
    return [
        (event.kind, layouts.program.values[event.value].shape)
        for event in layout.events
    ]


def test_what_a_layer_sends_is_what_textbooks_say():
    model = mlp_step(64, 256, 512)
    scalar = ("all-reduce", ())
    sums = {event for event in sent_under(("batch",), *model) if event != scalar}
    expected = {("all-reduce", (256, 64)), ("all-reduce", (64, 256))}
    assert sums == expected
    stored = [
        event for event in sent_under(("batch", "embed"), *model) if event != scalar
    ]
    assert sorted({kind for kind, _ in stored}) == ["all-gather", "reduce-scatter"]
    for _, shape in stored:
        assert sorted(shape) == [64, 256]
    # Megatron's: one sum of activations forward. There is none backward, as nothing is
    # learnt before the layer.
    expected = [("all-reduce", (512, 64))]
    assert sent_under(("mlp",), *model) == expected


def test_search_takes_data_or_tensor_parallelism_by_rows():
    devices = "tpu:v5e:2x4"
    many, *_ = search(*mlp_step(1024, 8192, 2**20), devices=devices, keep=1)
    for _, names in many.assignments:
        assert "batch" in names, many.title
    assert many.mesh.size == 8
    few, *_ = search(*mlp_step(8192, 32768, 16), devices=devices, keep=1)
    for _, names in few.assignments:
        assert "mlp" in names, few.title


def test_the_least_effort_partitions_few_programs():
    model = mlp_step(8192, 32768, 16)
    lines: list[str] = []
    few = search(*model, devices="tpu:v5e:2x4", effort="least", progress=lines.append)
    partitioned = [line for line in lines if line.startswith("partitioned")]
    assert 1 <= len(partitioned) <= 4
    assert len(few) <= len(partitioned)
    for line in lines:
        assert not line.startswith("constrained")
    assert few[0].fits
    assert few[0].by == "estimate"
    # What the whole search chooses for few rows.
    for _, names in few[0].assignments:
        assert "mlp" in names, few[0].title
    assert "plans_of" in few[0].code()


def test_an_unknown_effort_is_refused():
    with pytest.raises(RuleError, match='use "usual" or "least"'):
        search(*mlp_step(8, 8, 8), devices="cpu:2", effort="most")  # pyright: ignore[reportArgumentType]


def test_candidates_are_in_order_and_each_has_one_set_of_numbers():
    candidates = search(*MODELS["experts"](), devices=8, chip="v5p", keep=4)
    assert len(candidates) == 4
    assert {candidate.by for candidate in candidates} == {"estimate"}
    expected = sorted(candidate.seconds for candidate in candidates)
    assert [candidate.seconds for candidate in candidates] == expected
    assert len({candidate.title for candidate in candidates}) == 4
    for candidate in candidates:
        hidden = max(0, candidate.hidden_seconds - 0.5 * candidate.compute_seconds)
        assert candidate.seconds == pytest.approx(
            candidate.compute_seconds + candidate.exposed_seconds + hidden
        )
        assert candidate.wire_bytes == candidate.traffic.wire_bytes
    first = candidates[0]
    assert candidates[1].title in str(first)
    assert str(first).startswith(first.title)
    assert first.title in repr(first)
    # Lines are the user's own, and nothing is told twice with other numbers.
    assert "models.py:" in str(first)
    assert "source_info_util" not in str(candidates)
    assert "estimate" not in str(first)
    assert "(here" not in str(first)
    assert str(first.traffic) in first.explain()


def test_ways_by_hand_are_partitioned_and_a_step_is_traced_twice():
    """Data parallelism, fully sharded, tensor parallelism and both are partitioned,
    however the core prices them.
    """
    step, *args = mlp_step(64, 256, 512)
    lines: list[str] = []
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(len(args))
        return step(*args)

    search(counted, *args, devices=8, chip="v5e", progress=lines.append)
    looked = [
        line.partition(": ")[2] for line in lines if line.startswith("partitioned")
    ]
    for title in ("data=8 (batch)", "fsdp=8 (batch, embed)", "tensor=8 (mlp)"):
        assert title in looked, looked
    assert any(
        title.startswith("fsdp=") and ", tensor=" in title for title in looked
    ), looked
    # The step is traced once as it is, and once for all candidates that are
    # constrained.
    assert len(calls) == 2
    assert sum(line.startswith("constrained candidate") for line in lines) > 1
    space = space_of((step, *args), 8, "v5e")
    titles = [candidate.title for candidate in by_hand(space, space.usual)]
    assert titles == looked[: len(space.usual)]


def test_states_that_do_not_fit_are_cut():
    """Two matrices of 8 GiB, their gradients, and a batch that data parallelism would
    like: memory decides.
    """
    model = mlp_step(32768, 65536, 65536, "float32")
    best = search(*model, devices="tpu:v5e:4x4", keep=1)[0]
    assert best.fits
    assert best.memory_bytes < best.limit_bytes
    whole = Limits(never=("embed", "mlp"))
    alone = search(*model, devices="tpu:v5e:4x4", limits=whole)
    assert len(alone) == 1
    assert not alone[0].fits
    assert "nothing fits: this takes least" in alone[0].reasons[0]
    assert "use more devices, a smaller batch, or remat" in str(alone[0])


def test_above_what_xla_can_partition_candidates_say_so():
    model = mlp_step(1024, 4096, 2**17)
    best, *_ = candidates = search(*model, devices=4096, chip="v5p", keep=2)
    assert best.by == "estimate"
    assert best.mesh.size == 4096
    assert "extrapolated from" in str(best.traffic)
    expected = sorted(candidate.seconds for candidate in candidates)
    assert [candidate.seconds for candidate in candidates] == expected


def test_kernels_take_their_least_time_on_a_large_mesh():
    """Work halves with each doubling of the mesh; the least times of kernels do not."""
    model = mlp_step(256, 1024, 2**17)
    for devices in (4096, 65536):
        (best,) = search(*model, devices=devices, chip="v5p", keep=1, effort="least")
        assert 3e-6 < best.compute_seconds < 2e-5


def test_what_is_not_understood_is_noted():
    def step(p, x, n):
        y = jax.lax.fori_loop(0, n, lambda _, y: jnp.tanh(y @ p), x)
        return p - jnp.mean(y)

    search_result = search(
        step, f32(256, 256), f32(512, 256), Struct((), "int32"), devices=2, chip="v5e"
    )
    best = search_result[0]
    for text in (str(best), best.explain()):
        assert "note: the trips of a loop are not known and count once" in text


def test_a_step_over_a_mesh_of_its_own_is_an_error():
    other = MeshSpec({"i": 4, "j": 2}).abstract()

    def step(p, x):
        y = jax.lax.with_sharding_constraint(
            x @ p, jax.NamedSharding(other, jax.P("i"))
        )
        return jnp.tanh(y)

    with pytest.raises(
        ProgramError, match="the step constrains its arrays over a mesh of its own"
    ):
        search(step, f32(256, 256), f32(512, 256), devices=16, chip="v5e")


def test_how_a_jitted_step_and_its_arrays_lie_is_chosen():
    mesh = MeshSpec({"i": 4, "j": 2})
    rows = jax.NamedSharding(mesh.abstract(), jax.P("i"))
    plain = lambda p, x: jnp.tanh(x @ p)
    args = (f32(256, 256), f32(512, 256))
    columns = jax.NamedSharding(mesh.build(jax.devices()), jax.P(None, "j"))
    placed = jax.device_put(jnp.ones((256, 256)), columns), args[1]
    jitted = jax.jit(plain, in_shardings=(rows, rows), out_shardings=rows)
    asked = [(plain, *args), (jitted, *args), (plain, *placed)]
    first, *others = [
        search(
            *step_and_args,
            devices=8,
            chip="v5e",
            keep=1,
            effort="least",
        )[0]
        for step_and_args in asked
    ]
    for candidate in others:
        assert candidate.seconds == first.seconds
        assert candidate.rules == first.rules


def test_grouped_heads_are_cut_behind_those_they_share():
    """2 key heads and 8 query heads: cut 8 ways, queries lie on both parts, keys on the
    first alone.
    """
    never = ("batch", "sequence", "embed", "vocab")
    limits = Limits(
        always=("query_groups", "kv_heads"),
        never=never,
    )
    space = space_of(MODELS["scanned"](), 8, "v5p", limits)
    candidates = fastest(space, 50)
    for candidate in candidates:
        query, key = (candidate.plans[0][f"layers/{name}"] for name in "qk")
        assert key.bytes == 2 * key.bytes_per_device
        assert query.bytes // query.bytes_per_device in (4, 8)
    assert candidates


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("flax_transformer", 4),
        ("convolutions", 4),
        ("ragged_experts", 4),
        ("mlp", 3),
        ("mlp", 12),
    ],
)
def test_every_model_is_searched_for_odd_numbers_of_devices_too(name, devices):
    model = MODELS[name]()
    (best,) = search(
        *model,
        devices=devices,
        chip="h100",
        keep=1,
        effort="least",
    )
    assert best.mesh.size == devices
    assert best.by == "estimate"


def test_heads_behind_queries_keys_and_values_are_searched():
    """4 devices never cut the 3 of a fused `3 * heads * head_dim`, so no axis can cut
    the heads behind it.
    """
    candidates = fastest(space_of(odd_models.dit(), 4, "v5e"), 5)
    assert candidates
    for candidate in candidates:
        spec = candidate.plans[0]["blocks/0/qkv"].spec[1:]
        assert spec in ((), (None,))


def test_dimensions_that_int32_does_not_hold():
    def step(p, x):
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    args = {"up": f32(8, 16), "down": f32(16, 8)}, f32(2**31, 8)
    search_result = search(step, *args, devices=64, chip="v5p", keep=1)
    best = search_result[0]
    assert best.fits
    assert best.plans[1][""].spec[0] is not None
