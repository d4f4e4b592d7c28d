import dataclasses
import pickle
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfx import MeshSpec, PathRules, chips, constrain, filter_jit, plan
from shardfx.cost import compile_for, fit, seconds, traffic
from shardfx.errors import MeshError, OutOfMemoryError
from shardfx.interop import tpu


MESH = MeshSpec({"data": 4, "tensor": 2})


def plans():
    struct = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    rules = PathRules([("w", P(None, "tensor"))])
    w = plan(
        {"w": struct},
        MESH,
        paths=rules,
    )
    struct = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    rules = PathRules([(".*", P("data"))])
    x = plan(
        struct,
        MESH,
        paths=rules,
    )
    return {"params": w, "batch": x}


def structs():
    return [plan.structs for plan in plans().values()]


def step(params, batch):
    hidden = constrain(batch @ params["w"], P("data"), plans()["params"])
    return {"w": params["w"] - jnp.sum(hidden)}


class _Program:
    """A compiled program with a memory analysis, in the form that JAX has."""

    def __init__(self, platform, peak):
        counted = {
            "argument": 700,
            "output": 300,
            "alias": 100,
            "temp": 500,
            "generated_code": 1,
        }
        sizes = {f"{name}_size_in_bytes": count for name, count in counted.items()}
        sizes |= {f"host_{name}_size_in_bytes": 0 for name in counted}
        sizes["host_argument_size_in_bytes"] = 8
        if peak is not None:
            sizes["peak_memory_in_bytes"] = peak
        self.sizes = types.SimpleNamespace(**sizes)
        device = types.SimpleNamespace(platform=platform)
        self.input_shardings = ([types.SimpleNamespace(device_set=[device])], {})

    def memory_analysis(self):
        return self.sizes

    def as_text(self):
        return ""


@pytest.mark.parametrize(
    "platform, peak, needed",
    # That of TPUs holds what is in host memory, and JAX 0.9 does not hand it on; that
    # of CPUs leaves out temporaries.
    [("tpu", 1208, 1200), ("cpu", 900, 1400), ("tpu", None, 1400), ("tpu", 0, 1400)],
)
def test_what_a_program_needs_is_what_its_compiler_adds_up_to(platform, peak, needed):
    fitted = fit(_Program(platform, peak), chip="h100")
    assert fitted.peak_bytes == needed
    expected = {
        "arguments": 700,
        "results": 200,
        "temporaries": needed - 900,
    }
    assert {row.group: row.bytes for row in fitted.rows} == expected


def test_it_is_what_jax_compiles_and_pickles():
    arguments = structs()
    first = compile_for(jax.jit(step, donate_argnums=0), *arguments, target="cpu")
    on = {name: plan.on(MESH.build(jax.devices())) for name, plan in plans().items()}
    lowered = filter_jit(step, in_shardings=on, donate="params").lower(
        *[plan.structs for plan in on.values()]
    )
    theirs = lowered.compile()
    actual = traffic(first).by("kind")
    assert actual == traffic(theirs).by("kind")
    assert traffic(first).wire_bytes > 0
    axes = {row.axes for row in traffic(first).rows}
    assert axes == {row.axes for row in traffic(theirs).rows}
    memory = theirs.memory_analysis()
    assert first.memory.temp_size_in_bytes == memory.temp_size_in_bytes
    assert first.memory.alias_size_in_bytes == memory.alias_size_in_bytes > 0
    assert fit(first, chip="v5e").basis == "compiled"
    assert first.seconds > 0
    sent = traffic(pickle.loads(pickle.dumps(first)))
    assert sent == traffic(first)


@pytest.mark.parametrize(
    "form",
    [
        filter_jit(step, in_shardings=plans()),
        filter_jit(
            step,
            in_shardings={
                name: plan.on(MESH.build(jax.devices()))
                for name, plan in plans().items()
            },
        ),
        jax.jit(
            step,
            in_shardings=tuple(
                plan.on(MESH.build(jax.devices())).shardings
                for plan in plans().values()
            ),
        ),
    ],
    ids="plans plans-on-devices shardings-on-devices".split(),
)
def test_a_step_compiles_to_the_same_whatever_has_its_shardings(form):
    plain = traffic(compile_for(step, *structs(), target="cpu"))
    sent = traffic(compile_for(form, *structs(), target="cpu"))
    wire_bytes = sent.wire_bytes
    assert wire_bytes == plain.wire_bytes > 0
    sent = traffic(compile_for(form, *structs(), target=jax.devices()))
    wire_bytes = sent.wire_bytes
    assert wire_bytes == plain.wire_bytes


def test_targets_that_are_devices_and_errors(as_users_run_it):
    out = jax.tree.map(lambda struct: struct.sharding, structs()[0])
    target = MESH.build(jax.devices())
    compiled = compile_for(jax.jit(step, out_shardings=out), *structs(), target=target)
    assert compiled.target == "cpu"
    assert compiled.chip is None
    assert compiled.argument_paths["batch"] == "batch"
    assert compiled.argument_paths["params['w']"] == "params/w"
    with pytest.raises(
        MeshError,
        match="`target=7` is neither a slice, a mesh nor devices; write `target=",
    ):
        compile_for(step, *structs(), target=7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        MeshError,
        match="slice 'tpu:v5e:32x32' has 1,024 chips, and a pod of v5e is 16x16",
    ):
        compile_for(step, *structs(), target="tpu:v5e:32x32")
    large = MeshSpec({"data": 64})
    rules = PathRules([(".*", P("data"))])
    x = plan(
        jax.ShapeDtypeStruct((64, 16), jnp.float32),
        large,
        paths=rules,
    )
    with pytest.raises(
        MeshError, match=r"64 devices, but there are 8.*jax_num_cpu_devices\", 64"
    ):
        compile_for(jnp.sum, x.structs, target="cpu")


def moved(axis_sizes, spec, *out):
    """The traffic of a step that changes the spec of an f32 array on 8 devices."""
    mesh = MeshSpec(axis_sizes)
    struct = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    rules = PathRules([(".*", spec)])
    x = plan(
        struct,
        mesh,
        paths=rules,
    )
    after = jax.NamedSharding(mesh.abstract(), P(*out))
    sent = traffic(
        compile_for(
            jax.jit(lambda x: x + 0, out_shardings=after), x.structs, target="cpu"
        )
    )
    return (
        sent,
        mesh,
    )


def test_a_gather_takes_its_bytes_over_the_links_of_its_ring():
    sent, mesh = moved({"data": 8}, P("data"))
    (row,) = sent.rows
    chip = dataclasses.replace(chips.find("v5p"), link_bytes_per_second=1e9)
    # 8 chips of a 2x2x2: three lines of two. One ring of 8 closed at its ends: both
    # ways.
    assert seconds(sent, chip, mesh).rows[0].bytes_per_second == 3e9
    assert seconds(sent, chip, mesh, slice="1x1x8").rows[0].bytes_per_second == 2e9
    assert seconds(sent, chip, mesh, slice="1x2x4").rows[0].bytes_per_second == 3e9
    expected = pytest.approx(
        # Four hops of 1 us go half around the ring.
        row.wire_bytes / 2e9 + 4e-6
    )
    assert seconds(sent, chip, mesh, slice="1x1x8").seconds == expected
    # v5e closes none but rings of 16.
    rows = seconds(sent, "v5e", mesh, slice="1x8").rows[0]
    bytes_per_second = rows.bytes_per_second
    assert bytes_per_second == 45e9
    # Without a mesh one link is taken; a switch sends with all.
    assert seconds(sent, chip).rows[0].bytes_per_second == 1e9
    assert seconds(sent, "h100", mesh).rows[0].bytes_per_second == 450e9
    for wrong in ("4x4", "2x2x4", "2x2xtwo", "2x2x²"):
        with pytest.raises(
            MeshError,
            match=r"must have 3 extents that hold 8 chips of v5p, as in '2x2x2'",
        ):
            seconds(sent, "v5p", mesh, slice=wrong)


def test_two_axes_on_a_torus_use_the_links_of_both():
    sent, mesh = moved({"x": 2, "y": 4}, P("x", "y"))
    estimate = seconds(sent, "v4", mesh, slice="1x2x4")
    rates = {row.traffic.axes: row.bytes_per_second / 45e9 for row in estimate.rows}
    for axes in rates:
        expected = {"x": 1, "y": 2, "x y": 3}[" ".join(axes)]
        assert rates[axes] == expected
    assert rates
    total = sum(estimate.by_axes().values())
    assert total == pytest.approx(estimate.seconds)
    assert "v4" in str(estimate)
    assert "An estimate: bytes over bandwidth" in str(estimate)


def test_the_worked_answers_of_an_all_to_all_and_of_slices():
    sent, mesh = moved({"data": 8}, P("data"), None, "data")
    (row,) = sent.rows
    assert row.kind == "all-to-all"
    # On a ring an exchange of an array of V bytes takes V / 4 of the ring's bandwidth,
    # both ways (Scaling book, 3).
    estimate = seconds(sent, "v4", mesh, slice="1x1x8")
    bytes_over_bandwidth = 1024 * 1024 * 4 * 7 / 8 / 4 / (2 * 45e9)
    assert estimate.seconds == pytest.approx(bytes_over_bandwidth + 4e-6)
    across = dataclasses.replace(
        sent, rows=(dataclasses.replace(row, dcn_bytes=row.wire_bytes // 2),)
    )
    slow = seconds(across, "v4", MeshSpec({"data": 8}, dcn={"data": 2})).rows[0]
    assert (
        slow.dcn_seconds == pytest.approx(across.dcn_bytes / 6.25e9)
        and slow.seconds > slow.dcn_seconds
    )


def refused(text, monkeypatch):
    """Compiles a step with a compiler that raises an error with this text."""

    def refuse(lowered, **options):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    sharding = NamedSharding(MESH.abstract(), P("data"))
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    return compile_for(jnp.sin, struct, target="cpu")


# The first two are libtpu's own words.
@pytest.mark.parametrize(
    ("text", "needed", "limit"),
    [
        (
            (
                "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory"
                " required for HLO temporaries (16.18G) exceeds available HBM (15.75G)."
            ),
            int(16.18 * 2**30),
            int(15.75 * 2**30),
        ),
        (
            (
                "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory"
                " in memory space hbm. Used 900.50M of 512.00M hbm. Exceeded hbm"
                " capacity by 388.50M."
            ),
            int(900.5 * 2**20),
            512 * 2**20,
        ),
        ("RESOURCE_EXHAUSTED: there is no room.", None, None),
    ],
)
def test_a_program_that_does_not_fit_is_an_error_of_its_own(
    text,
    needed,
    limit,
    monkeypatch,
):
    with pytest.raises(
        OutOfMemoryError,
        match=r"does not fit a device: .*`shardfx.cost.fit\(step, \*args",
    ) as raised:
        refused(text, monkeypatch)
    assert raised.value.needed_bytes == needed
    assert raised.value.limit_bytes == limit
    assert str(raised.value.__cause__) == text
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="INTERNAL"
    ):  # other errors stay
        refused("INTERNAL: of another kind", monkeypatch)


def test_a_compiler_that_another_process_holds_is_said_to_be(monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError(
            "ABORTED: Internal error when accessing libtpu multi-process lockfile"
        )

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuses)
    with pytest.raises(
        MeshError, match="lockfile. Another process holds libtpu: wait, or set ALLOW"
    ):
        tpu.devices_of("tpu:v5e:2x4")
