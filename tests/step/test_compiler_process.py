"""The answers of the process in which a compiler runs."""

import io

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardfx
from shardfx._step.partitioner import partitioned
from shardfx._step.process import Worker
from shardfx.errors import ProgramError


ANSWERS = ["{}", "[]", '{"sizes": 3, "error": ""}', '{"sizes": [9], "error": ""}', ""]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_broken_answer_ends_the_process(answer, tmp_path):
    program = tmp_path / "answers.py"
    program.write_text(f"import sys\nsys.stdin.buffer.readline()\nprint({answer!r})\n")
    worker = Worker([str(program)])
    texts, error = worker.ask(b"", {})
    assert texts == []
    assert error.startswith("the process that asks the compiler ended (")
    assert not worker.is_alive


def test_an_answer_is_texts_and_an_error(tmp_path):
    program = tmp_path / "answers.py"
    answer = '{"sizes": [2, 1], "error": "no"}\nabc'
    program.write_text(
        "import sys\nsys.stdin.buffer.readline()\n"
        f"sys.stdout.write({answer!r})\nsys.stdout.flush()\nsys.stdin.read()\n"
    )
    worker = Worker([str(program)])
    assert worker.ask(b"", {}) == ([b"ab", b"c"], "no")
    assert worker.is_alive
    worker.end()


def test_the_folder_of_a_process_that_is_gone_is_removed(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    program = tmp_path / "ends.py"
    program.write_text("")
    worker = Worker([str(program)], str(folder))
    worker._process.wait()

    # A request of this size waits in the buffer of the pipe.
    texts, error = worker.ask(b"module", {})
    assert texts == []
    assert "BrokenPipeError" in error
    assert not worker.is_alive
    assert not folder.exists()


def test_a_module_that_xla_cannot_read_is_refused():
    with pytest.raises(ProgramError, match="XLA cannot partition this step for 2 dev"):
        partitioned(b"", devices=2)


@pytest.mark.parametrize("sizes", [(2, 4), (2, 3)])
def test_a_program_is_partitioned_as_on_all_devices(sizes, tmp_path):
    """One device stands for all in the process; JAX compiles for as many as there are."""
    rows, columns = sizes
    devices = jax.devices()[: rows * columns]
    mesh = shardfx.MeshSpec({"a": rows, "b": columns}).build(devices)
    rules = shardfx.PathRules([("x", P("a")), ("w", P(None, "b"))])
    structs = {
        "x": jax.ShapeDtypeStruct((12, 24), jnp.float32),
        "w": jax.ShapeDtypeStruct((24, 48), jnp.float32),
    }
    plan = shardfx.plan(structs, mesh, paths=rules)

    def loss(tree):
        return jnp.tanh(jnp.sort(tree["x"] @ tree["w"], axis=0)).sum()

    lowered = jax.jit(jax.grad(loss)).lower(plan.structs)
    options: dict[str, str | bool] = {
        "xla_dump_to": str(tmp_path),
        "xla_dump_hlo_pass_re": "spmd-partitioning",
    }
    lowered.compile(compiler_options=options)
    (file,) = tmp_path.glob("*after_spmd-partitioning*.txt")
    # The first line has options of the compilation.
    header, _, expected = file.read_text().partition("\n")
    module = lowered.compiler_ir()
    assert module is not None
    sink = io.BytesIO()
    module.operation.write_bytecode(sink)
    text = partitioned(sink.getvalue(), mesh.size)
    assert text.partition("\n")[2] == expected
    assert f"num_partitions={mesh.size}" in header
