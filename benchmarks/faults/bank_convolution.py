"""Layers of the bank: convolutions of one to three dimensions, pools, images."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._layers import layer


NCHW = ("NCHW", "OIHW", "NCHW")
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x, w, stride=1, groups=1, numbers=NCHW, padding="SAME", dilation=1):
    """A convolution over two spatial dimensions."""
    return lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        padding,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=numbers,
        feature_group_count=groups,
    )


@layer("convolution", x="b c y x", w="o c 3 3")
def conv_plain(x, w):
    return conv(x, w)


@layer("convolution", x="b c y x", w="o c 3 3")
def conv_strided(x, w):
    return conv(x, w, stride=2)


@layer("convolution", x="b c y x", w="o c 1 1")
def conv_pointwise_strided(x, w):
    return conv(x, w, stride=2)


@layer("convolution", x="b y x c", w="3 3 c o")
def conv_last(x, w):
    return conv(x, w, numbers=NHWC)


@layer("convolution", x="b y x c", w="3 3 c o")
def conv_last_valid(x, w):
    return conv(x, w, numbers=NHWC, padding="VALID")


@layer("convolution", x="b c y x", w="o c 3 3")
def conv_dilated(x, w):
    return conv(x, w, dilation=2)


@layer("convolution", x="b 2*g y x", w="4*g g 3 3")
def conv_grouped(x, w):
    return conv(x, w, groups=2)


@layer("convolution", x="b c y x", w="c 1 3 3")
def conv_depthwise(x, w):
    return conv(x, w, groups=x.shape[1])


@layer("convolution", x="b c y x", w="2*c 1 3 3")
def conv_depthwise_wide(x, w):
    return conv(x, w, groups=x.shape[1])


@layer("convolution", x="b c y x", depth="c 1 3 3", point="o c 1 1")
def conv_separable(x, depth, point):
    convolved = conv(x, depth, groups=x.shape[1])
    return conv(jax.nn.relu(convolved), point)


@layer("convolution", x="b y x c", w="3 3 c o")
def conv_transposed(x, w):
    strides = (2, 2)
    return lax.conv_transpose(x, w, strides, "SAME", dimension_numbers=NHWC)


@layer("convolution", x="b t c", w="3 c o")
def conv_1d(x, w):
    dimensions = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=dimensions)


@layer("convolution", x="b t c", w="4 1 c")
def conv_causal(x, w):
    dimensions = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(
        x,
        w,
        (1,),
        [(3, 0)],
        dimension_numbers=dimensions,
        feature_group_count=x.shape[2],
    )


@layer("convolution", x="b 2*t c", w="4 c o")
def conv_1d_strided(x, w):
    dimensions = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=dimensions)


@layer("convolution", x="b 4 y x c", w="3 3 3 c o")
def conv_3d(x, w):
    dimensions = ("NDHWC", "DHWIO", "NDHWC")
    strides = (1, 1, 1)
    return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=dimensions)


@layer("convolution", x="b 4 y x c", w="2 2 2 c o")
def conv_3d_strided(x, w):
    dimensions = ("NDHWC", "DHWIO", "NDHWC")
    strides = (2, 2, 2)
    return lax.conv_general_dilated(
        x, w, strides, "VALID", dimension_numbers=dimensions
    )


@layer("vit", x="b 16 16 4", w="4 4 4 d", v="d d")
def vit_patches(x, w, v):
    patches = conv(x, w, stride=4, numbers=NHWC)
    flat = patches.reshape(x.shape[0], 16, w.shape[3])
    return flat @ v


@layer("vit", x="b 8 8 c", w="16*c d")
def vit_patches_reshaped(x, w):
    batch, _, _, channels = x.shape
    split = x.reshape(batch, 2, 4, 2, 4, channels)
    patches = split.swapaxes(2, 3)
    return patches.reshape(batch, 4, 16 * channels) @ w


@layer("vit", x="b t d", token="1 1 d", position="t+1 d")
def class_token(x, token, position):
    token_shape = (x.shape[0], 1, x.shape[2])
    tokens = jnp.broadcast_to(token, token_shape)
    extended = jnp.concatenate([tokens, x], axis=1)
    return extended + position


@layer("resnet", x="b c y x", w="c c 3 3", v="2*c c 3 3")
def conv_pair(x, w, v):
    hidden = conv(x, w)
    activated = jnp.sin(hidden)
    return conv(activated, v, stride=2)


@layer(
    "resnet",
    x="b c y x",
    w="c c 3 3",
    v="c c 3 3",
    scale="c",
)
def resnet_block(x, w, v, scale):
    convolved = conv(x, w)
    hidden = jax.nn.relu(convolved * scale[:, None, None])
    residual = conv(hidden, v)
    return jax.nn.relu(x + residual)


@layer(
    "resnet",
    x="b c y x",
    w="2*c c 3 3",
    v="2*c 2*c 3 3",
    skip="2*c c 1 1",
)
def resnet_strided(x, w, v, skip):
    convolved = conv(x, w, stride=2)
    hidden = jax.nn.relu(convolved)
    skipped = conv(x, skip, stride=2)
    residual = conv(hidden, v)
    return skipped + residual


@layer("resnet", x="b c y x", down="c r", up="r c")
def squeeze_excite(x, down, up):
    means = x.mean((2, 3))
    squeezed = jax.nn.relu(means @ down)
    gate = jax.nn.sigmoid(squeezed @ up)
    return x * gate[:, :, None, None]


@layer("u-net", x="b c 8 8", w="2*c c 3 3", v="o 3*c 3 3")
def unet(x, w, v):
    small = conv(x, w, stride=2)
    rows = jnp.repeat(small, 2, axis=2)
    large = jnp.repeat(rows, 2, axis=3)
    joined = jnp.concatenate([large, x], axis=1)
    return conv(joined, v)


@layer("u-net", x="b 8 8 c", w="3 3 c c", v="3 3 c c")
def unet_transposed(x, w, v):
    convolved = conv(x, w, stride=2, numbers=NHWC)
    small = jax.nn.silu(convolved)
    strides = (2, 2)
    upsampled = lax.conv_transpose(small, v, strides, "SAME", dimension_numbers=NHWC)
    return x + upsampled


@layer("pool", x="b c y x")
def max_pool(x):
    low = np.array(-np.inf, x.dtype)
    window = (1, 1, 3, 3)
    strides = (1, 1, 2, 2)
    return lax.reduce_window(x, low, lax.max, window, strides, "SAME")


@layer("pool", x="b c y x")
def max_pool_even(x):
    low = np.array(-np.inf, x.dtype)
    window = (1, 1, 2, 2)
    return lax.reduce_window(x, low, lax.max, window, window, "VALID")


@layer("pool", x="b c 8 8", w="c o")
def average_pool(x, w):
    zero = np.array(0, x.dtype)
    window = (1, 1, 2, 2)
    sums = lax.reduce_window(x, zero, lax.add, window, window, "VALID")
    means = sums / 4
    pooled = means.mean((2, 3))
    return pooled @ w


@layer("pool", x="b t d")
def moving_average(x):
    zero = np.array(0, x.dtype)
    sums = lax.reduce_window(x, zero, lax.add, (1, 3, 1), (1, 1, 1), "SAME")
    return sums / 3


@layer("image", x="b y x c")
def upsample_nearest(x):
    batch, height, width, channels = x.shape
    size = (batch, 2 * height, 2 * width, channels)
    return jax.image.resize(x, size, "nearest")


@layer("image", x="b y x c")
def upsample_linear(x):
    batch, height, width, channels = x.shape
    size = (batch, 2 * height, 2 * width, channels)
    return jax.image.resize(x, size, "bilinear")


@layer("image", x="b 4*g y x")
def pixel_shuffle(x):
    batch, channels, height, width = x.shape
    groups = channels // 4
    split = x.reshape(batch, groups, 2, 2, height, width)
    moved = split.transpose(0, 1, 4, 2, 5, 3)
    return moved.reshape(batch, channels // 4, 2 * height, 2 * width)


@layer("image", x="b 8 8 c")
def swin_windows(x):
    x = jnp.roll(x, (-2, -2), axis=(1, 2))
    batch, _, _, channels = x.shape
    split = x.reshape(batch, 2, 4, 2, 4, channels)
    windows = split.swapaxes(2, 3)
    return windows.reshape(batch * 4, 16, channels)


@layer("image", x="b 16 d", w="d 4*c")
def unpatch(x, w):
    batch = x.shape[0]
    projected = x @ w
    pixels = projected.reshape(batch, 4, 4, 2, 2, w.shape[1] // 4)
    ordered = pixels.transpose(0, 1, 3, 2, 4, 5)
    return ordered.reshape(batch, 8, 8, w.shape[1] // 4)


@layer("image", x="b y x c", offset="2 : below 4")
def random_crop(x, offset):
    padding = ((0, 0), (2, 2), (2, 2), (0, 0))
    padded = jnp.pad(x, padding)
    corner = (0, offset[0], offset[1], 0)
    return lax.dynamic_slice(padded, corner, x.shape)
