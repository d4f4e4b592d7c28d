"""The kernels of a TPU's program, from the text of partitioned programs."""

import jax
import jax.numpy as jnp
import pytest

from shardfx import MeshSpec, chips
from shardfx.cost._kernels import kernel_seconds, kernels_of
from tests.programs import device_program


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


X = f32(64, 256)
W = f32(256, 128)
X_BYTES = 4 * 64 * 256
TILE = (8, 128)
V5E = chips.find("v5e")

# Dimensions of a matrix.
WHOLE = ((), ())
ROWS = (("data",), ())
COLUMNS = ((), ("data",))


def kernels(step, *args, devices=2, dims=None, tile=TILE):
    """The kernels of a step on one device, of arguments that are cut along `dims`."""
    mesh = MeshSpec({"data": devices})
    module = device_program(step, args, platform="tpu", mesh=mesh, dims=dims)
    return kernels_of(module, tile)


def with_products(all_kernels):
    return [kernel for kernel in all_kernels if kernel.has_product]


def with_permutes(all_kernels):
    return [kernel for kernel in all_kernels if kernel.permutes]


def test_a_product_reads_bfloat16_and_holds_what_follows_it():
    (product,) = kernels(jnp.dot, X, W)
    assert product.has_product
    assert product.runs == 1
    assert product.flops == 2 * 64 * 256 * 128
    operand_bytes = 2 * (64 * 256 + 256 * 128)
    result_bytes = 4 * 64 * 128
    assert product.bytes == operand_bytes + result_bytes

    def followed(x, w):
        product = x @ w
        return jnp.tanh(product) + 1

    (fused,) = kernels(followed, X, W)
    assert fused == product


def test_elementwise_operations_are_one_kernel_between_products():
    def elementwise(x):
        y = jnp.exp(x) + 1
        return jnp.tanh(y) * x

    (kernel,) = kernels(elementwise, X)
    assert kernel.bytes == 2 * X_BYTES

    def summed(x):
        doubled = jnp.sum(x * 2, 1)
        squared = jnp.sum(x * x, 1)
        return doubled + squared

    # The result of the first product is read twice, so it is written.
    kernels_of_sums = kernels(summed, X)
    large = [kernel for kernel in kernels_of_sums if kernel.bytes > X_BYTES]
    assert len(large) == 1


def test_loops_run_their_kernels_and_keep_what_they_carry():
    def looped(x, w):
        def turn(carry, _):
            return jnp.tanh(carry @ w), carry[0, 0]

        last, _ = jax.lax.scan(turn, x, length=5)
        return last

    (product,) = with_products(kernels(looped, X, f32(256, 256)))
    assert product.runs == 5
    # It writes, and reads nothing from memory.
    assert product.bytes < 2 * 256 * 256


def test_dimensions_are_padded_to_tiles_and_to_the_matrix_unit():
    w = f32(40, 10)
    (product,) = kernels(jnp.dot, f32(60, 40), w)
    # 10 columns of the result are rows of the unit: 16 x 128 x 128.
    assert product.flops == 2 * 16 * 128 * 128
    (elementwise,) = kernels(jnp.tanh, w)
    assert elementwise.bytes == 2 * 4 * 16 * 128
    (unpadded,) = kernels(jnp.tanh, w, tile=None)
    assert unpadded.bytes == 2 * 4 * 40 * 10


@pytest.mark.parametrize(("batch", "count"), [(2, 5), (8, 1)])
def test_a_small_batch_of_images_is_reordered(batch, count):
    images = f32(batch, 16, 16, 32)
    weights = f32(3, 3, 32, 32)

    def convolved(images, weights):
        return jax.lax.conv_general_dilated(
            images,
            weights,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def loss(weights, images):
        return convolved(images, weights).sum()

    assert len(kernels(convolved, images, weights)) == count
    backward = kernels(jax.grad(loss), weights, images)
    products = with_products(backward)
    assert len(backward) - len(products) >= count - 1
    # One position of a kernel is a matrix product.
    single_weights = f32(1, 1, 32, 32)
    assert len(kernels(convolved, images, single_weights)) == 1


def test_a_kernel_takes_its_least_time_and_the_longer_of_two():
    (product,) = kernels(jnp.dot, X, W)
    (elementwise,) = kernels(jnp.tanh, X)
    assert 0.2e-6 < kernel_seconds([product], V5E, 1.0) < 0.5e-6
    seconds = kernel_seconds([elementwise], V5E, 0.5)
    # It reads and writes at half of the bandwidth.
    memory_seconds = 2 * 2 * X_BYTES / 819e9
    assert seconds == pytest.approx(1.2e-6 + memory_seconds)
    seconds_of_three = kernel_seconds([elementwise] * 3, V5E, 0.5)
    assert seconds_of_three == pytest.approx(3 * seconds)


def test_an_update_is_read_in_a_buffer_of_constants_too():
    update = f32(16, 256)
    update_bytes = 4 * 16 * 256

    def updated(buffer, update):
        rows = jnp.tanh(update)
        return jax.lax.dynamic_update_slice(buffer, rows, (0, 0))

    def of_zeros(update):
        zeros = jnp.zeros(X.shape)
        buffer = jax.lax.dynamic_update_slice(zeros, update, (8, 0))
        return jnp.tanh(buffer)

    (kernel,) = kernels(updated, X, update)
    assert kernel.bytes == 2 * update_bytes
    (kernel,) = kernels(of_zeros, update)
    assert kernel.bytes == update_bytes + X_BYTES


def loops(w_dims, x_rows=16384):
    """The kernels of the loops in `x @ w` over 8 devices, each of which has an eighth
    of the rows of `x`.
    """
    x = bf16(x_rows, 1024)
    w = bf16(1024, 512)
    return with_permutes(kernels(jnp.dot, x, w, devices=8, dims=[ROWS, w_dims]))


def test_a_product_of_a_gathered_operand_is_a_loop():
    # Each step adds the product of two pieces of the operands to the whole result.
    (summed,) = loops(ROWS)
    x_bytes = 2 * 2048 * 1024
    w_bytes = 2 * 1024 * 512
    result_bytes = 2 * 2048 * 512
    flops = 2 * 2048 * 1024 * 512
    assert summed.runs == 4
    assert summed.has_product
    assert summed.flops == flops / 4
    assert summed.bytes == (x_bytes + w_bytes) / 4 + 2 * result_bytes
    # 64 columns of a piece are padded to 128. Each step reads all rows.
    (pieces,) = loops(COLUMNS)
    assert pieces.runs == 4
    assert pieces.flops == 2 * flops / 4
    assert pieces.bytes == (w_bytes + 2 * result_bytes) / 4 + x_bytes
    # Nothing is gathered, or it takes longer than the product.
    assert not loops(WHOLE)
    assert not loops(ROWS, x_rows=64)


def test_an_operand_that_is_read_twice_is_gathered_once():
    def step(x, w):
        return (x @ w) @ w

    x = bf16(16384, 512)
    w = bf16(512, 512)
    assert not with_permutes(kernels(step, x, w, devices=8, dims=[ROWS, ROWS]))


def test_a_sum_of_which_each_device_keeps_a_slice_is_a_loop():
    def step(x, w, y):
        return w - (x.T @ y)

    x = bf16(16384, 1024)
    w = bf16(1024, 512)
    y = bf16(16384, 512)
    dims = [ROWS, ROWS, ROWS]
    (loop,) = with_permutes(kernels(step, x, w, y, devices=8, dims=dims))
    # Each step reads its pieces of the one operand, and the other operand.
    assert loop.runs == 4
    divided_bytes = 2 * 2048 * 1024 + 4 * 1024 * 512
    y_bytes = 2 * 2048 * 512
    assert loop.bytes == divided_bytes / 4 + y_bytes
    seconds = kernel_seconds([loop], V5E, 0.8)
    assert seconds > 4 * V5E.hop_seconds
