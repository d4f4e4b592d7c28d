"""The kernels of a TPU's program, from the text of partitioned programs."""

import jax
import jax.numpy as jnp
import pytest

from shardfx import MeshSpec, _step, chips
from shardfx.cost._kernels import kernel_seconds, kernels_of


X = jax.ShapeDtypeStruct((64, 256), "float32")
W = jax.ShapeDtypeStruct((256, 128), "float32")
TILE = (8, 128)
V5E = chips.find("v5e")


def kernels(step, *args, mesh=None, dims=None, tile=TILE):
    compiled_step = _step.step_of(step, args)
    text = compiled_step.partitioned(
        "tpu",
        mesh=MeshSpec(mesh or {"data": 2}),
        arguments=dims or [((),) * len(arg.shape) for arg in args],
        results=[None] * len(compiled_step.parameters[1]),
    )
    return kernels_of(_step.parse_hlo(text), tile)


def test_a_product_reads_bfloat16_and_holds_what_follows_it():
    (product,) = kernels(jnp.dot, X, W)
    assert product.has_product and product.runs == 1
    assert product.flops == 2 * 64 * 256 * 128
    assert product.bytes == 2 * (64 * 256 + 256 * 128) + 4 * 64 * 128
    (fused,) = kernels(lambda x, w: jnp.tanh(x @ w) + 1, X, W)
    assert fused == product


def test_elementwise_operations_are_one_kernel_between_products():
    (one,) = kernels(lambda x: jnp.tanh(jnp.exp(x) + 1) * x, X)
    assert one.bytes == 2 * 4 * 64 * 256
    # The result of the first product is read twice, so it is written.
    found = kernels(lambda x: jnp.sum(x * 2, 1) + jnp.sum(x * x, 1), X)
    assert sum(kernel.bytes > 4 * 64 * 256 for kernel in found) == 1


def test_loops_run_their_kernels_and_keep_what_they_carry():
    def looped(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c[0, 0]), x, length=5)[0]

    square = jax.ShapeDtypeStruct((256, 256), "float32")
    products = [each for each in kernels(looped, X, square) if each.has_product]
    assert [each.runs for each in products] == [5]
    # It writes, and reads nothing from memory.
    assert products[0].bytes < 2 * 256 * 256


def test_dimensions_are_padded_to_tiles_and_to_the_matrix_unit():
    x = jax.ShapeDtypeStruct((60, 40), "float32")
    w = jax.ShapeDtypeStruct((40, 10), "float32")
    (product,) = kernels(jnp.dot, x, w)
    # 10 columns of the result are rows of the unit: 16 x 128 x 128.
    assert product.flops == 2 * 16 * 128 * 128
    (elementwise,) = kernels(jnp.tanh, w)
    assert elementwise.bytes == 2 * 4 * 16 * 128
    (unpadded,) = kernels(jnp.tanh, w, tile=None)
    assert unpadded.bytes == 2 * 4 * 40 * 10


@pytest.mark.parametrize(("batch", "count"), [(2, 5), (8, 1)])
def test_a_small_batch_of_images_is_reordered(batch, count):
    image = jax.ShapeDtypeStruct((batch, 16, 16, 32), "float32")
    kernel = jax.ShapeDtypeStruct((3, 3, 32, 32), "float32")

    def convolved(image, kernel):
        labels = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=labels
        )

    assert len(kernels(convolved, image, kernel)) == count

    def gradient(image, kernel):
        return jax.grad(lambda kernel: convolved(image, kernel).sum())(kernel)

    found = kernels(gradient, image, kernel)
    products = [each for each in found if each.has_product]
    assert len(found) - len(products) >= (count - 1)
    # One position of a kernel is a matrix product.
    one = jax.ShapeDtypeStruct((1, 1, 32, 32), "float32")
    assert len(kernels(convolved, image, one)) == 1


def test_a_kernel_takes_its_least_time_and_the_longer_of_two():
    (product,) = kernels(jnp.dot, X, W)
    (elementwise,) = kernels(jnp.tanh, X)
    assert 0.2e-6 < kernel_seconds([product], V5E, 1.0) < 0.5e-6
    seconds = kernel_seconds([elementwise], V5E, 0.5)
    assert seconds == pytest.approx(1.2e-6 + 4 * 4 * 64 * 256 / 819e9)
    assert kernel_seconds([elementwise] * 3, V5E, 0.5) == pytest.approx(3 * seconds)


def test_an_update_is_read_in_a_buffer_of_constants_too():
    update = jax.ShapeDtypeStruct((16, 256), "float32")

    def updated(buffer, update):
        return jax.lax.dynamic_update_slice(buffer, jnp.tanh(update), (0, 0))

    def of_zeros(update):
        return jnp.tanh(
            jax.lax.dynamic_update_slice(jnp.zeros(X.shape), update, (8, 0))
        )

    (kernel,) = kernels(updated, X, update)
    assert kernel.bytes == 2 * 4 * 16 * 256
    (kernel,) = kernels(of_zeros, update)
    assert kernel.bytes == 4 * 16 * 256 + 4 * 64 * 256


def loops(w_dims, x_rows=16384):
    """The kernels of the loops in `x @ w` over 8 devices, each of which has an eighth
    of the rows of `x`.
    """
    x = jax.ShapeDtypeStruct((x_rows, 1024), "bfloat16")
    w = jax.ShapeDtypeStruct((1024, 512), "bfloat16")
    dims = [(("data",), ()), w_dims]
    found = kernels(jnp.dot, x, w, mesh={"data": 8}, dims=dims)
    return [kernel for kernel in found if kernel.permutes]


def test_a_product_of_a_gathered_operand_is_a_loop():
    # Each step adds the product of two pieces of the operands to the whole result.
    (summed,) = loops((("data",), ()))
    operands = 2 * (2048 * 1024 + 1024 * 512)
    assert summed.runs == 4 and summed.has_product
    assert summed.flops == 2 * 2048 * 1024 * 512 / 4
    assert summed.bytes == operands / 4 + 2 * 2 * 2048 * 512
    # 64 columns of a piece are padded to 128. Each step reads all rows.
    (pieces,) = loops(((), ("data",)))
    assert pieces.runs == 4
    assert pieces.flops == 2 * 2 * 2048 * 1024 * 512 / 4
    assert pieces.bytes == (2 * 1024 * 512 + 4 * 2048 * 512) / 4 + 2 * 2048 * 1024
    # Nothing is gathered, or it takes longer than the product.
    assert not loops(((), ()))
    assert not loops((("data",), ()), x_rows=64)


def test_an_operand_that_is_read_twice_is_gathered_once():
    def step(x, w):
        return (x @ w) @ w

    x = jax.ShapeDtypeStruct((16384, 512), "bfloat16")
    w = jax.ShapeDtypeStruct((512, 512), "bfloat16")
    dims = [(("data",), ()), (("data",), ())]
    found = kernels(step, x, w, mesh={"data": 8}, dims=dims)
    assert not any(kernel.permutes for kernel in found)


def test_a_sum_of_which_each_device_keeps_a_slice_is_a_loop():
    def step(x, w, y):
        return w - (x.T @ y)

    x = jax.ShapeDtypeStruct((16384, 1024), "bfloat16")
    w = jax.ShapeDtypeStruct((1024, 512), "bfloat16")
    y = jax.ShapeDtypeStruct((16384, 512), "bfloat16")
    rows = (("data",), ())
    found = kernels(step, x, w, y, mesh={"data": 8}, dims=[rows, rows, rows])
    (loop,) = (kernel for kernel in found if kernel.permutes)
    # Each step reads its pieces of the one operand, and the other operand.
    assert loop.runs == 4
    divided = 2 * 2048 * 1024 + 4 * 1024 * 512
    assert loop.bytes == divided / 4 + 2 * 2048 * 512
    seconds = kernel_seconds([loop], V5E, 0.8)
    assert seconds > 4 * V5E.hop_seconds
