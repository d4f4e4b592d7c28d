"""How many devices share the rows of a batch, by tensor parallelism: a choice from the
shapes of the weights and the tokens of a batch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._ground.errors import LeafTypeError
from .._ground.tree import flatten
from ._asked import SearchOptions
from ._choices import Span, fsdp_spans, switched_devices
from ._core import byte_seconds, hop_counts, rates_of
from ._space import MODEL
from ._whole import ShardableArray


# The floating-point operations of a token for each element of the weights: two in the
# forward pass, and twice as many in the backward pass.
_FLOPS = 6
# A matrix's activations are reduced in one of the two passes, and in the forward pass
# also where it is computed again; a reduction sends everything twice.
_REDUCED = 2 * 3 / 2
# A state may take this part of a device's memory beside any activations, and this one
# with those of a known batch.
COMFORTABLE = 1 / 2
FULL = 15 / 16
# FSDP gathers weights for both passes, and scatters gradients.
_GATHERED = 3


class BatchSize(NamedTuple):
    """The rows of a batch, and the number of its tokens: the rows of the matrices that
    the weights are multiplied with. `rows` is the common divisor of `rows_of_arrays`,
    the numbers of rows of its arrays, each once.
    """

    rows: int
    tokens: int
    rows_of_arrays: tuple[int, ...]


def batch_size(batch: PyTree, batch_dim: int) -> BatchSize:
    """The size of a batch, of arrays or structs whose dimension `batch_dim` has the rows.

    Each integer is a token, as in ids of shape `[rows, length]`. Floats have features in
    their last dimension, as in `[rows, patches, features]`. Raises `LeafTypeError` for a
    batch without rows.
    """
    flat = flatten(batch)
    counts: list[int] = []
    tokens = 0
    for leaf, is_array in zip(flat.leaves, flat.is_array, strict=True):
        shape = jnp.shape(leaf) if is_array else ()
        last = len(shape) - 1
        if not 0 <= batch_dim <= last:
            continue
        counts.append(shape[batch_dim])
        is_integer = jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
        has_features = not is_integer and batch_dim < last
        tokens = max(tokens, math.prod(shape[:last] if has_features else shape))
    rows = math.gcd(*counts)
    if rows == 0:
        raise LeafTypeError(
            f"`batch`, {type(batch).__name__}, holds no arrays with rows in dimension"
            f" {batch_dim}; pass the arguments of a step beside the state, or structs of"
            ' them, `batch=jax.ShapeDtypeStruct((64, 2048), "int32")`, and `batch_dim=1`'
            " if the first dimension is time or microbatches."
        )
    rows_of_arrays = tuple(dict.fromkeys(counts))
    return BatchSize(rows=rows, tokens=tokens, rows_of_arrays=rows_of_arrays)


class StepEstimate(NamedTuple):
    """What an estimate of a step needs: the tokens of a batch, the arrays of a model with
    the bytes of each (0 for those too small to be sharded), the bytes of the whole
    training state, and the devices.
    """

    tokens: int
    arrays: Sequence[ShardableArray]
    array_bytes: Sequence[int]
    state_bytes: int
    hardware: SearchOptions

    def comfortable_bytes(self, tensor: int) -> float:
        """The bytes of the state that leave a device with enough memory for activations,
        in groups of `tensor` devices. Enough for any step is half of the memory. Else a
        step keeps the inputs of each layer, and the widest activations: for each token,
        as many elements as an array has for each element of its `long_side`.
        """
        memory = self.hardware.chip.usable_hbm_bytes_per_device
        bytes_of_token = 0.0
        widest_bytes = 0.0
        for array, array_bytes in zip(self.arrays, self.array_bytes, strict=True):
            bytes_of_token += array_bytes / array.long_side
            element_bytes = array_bytes / max(math.prod(array.shape), 1)
            bytes_of_longest = element_bytes * max(array.shape, default=0)
            widest_bytes = max(widest_bytes, bytes_of_longest)
        tokens = self.tokens * tensor / self.hardware.total
        activation_bytes = tokens * (bytes_of_token + widest_bytes / tensor)
        return max(COMFORTABLE * memory, FULL * memory - activation_bytes)

    def seconds(self, tensor: int) -> float:
        """The seconds of a step with groups of `tensor` devices for tensor parallelism.

        Each array that a group shards reduces activations within it: those of its input
        or its output, whichever is narrower. Gradients are reduced over the groups,
        beside computation. If the state leaves too little memory, it is sharded over as
        few groups as possible, and weights are gathered. An array too small to be
        sharded has 0 in `array_bytes`.
        """
        groups = self.hardware.total // tensor
        tokens = self.tokens / groups
        flops = 0.0
        weight_bytes = 0.0
        activation_bytes = 0.0
        calls = 0
        for array, array_bytes in zip(self.arrays, self.array_bytes, strict=True):
            whole = array.whole_by_tensor(tensor)
            is_divided = any(
                size % tensor == 0 and dim not in whole
                for dim, size in enumerate(array.shape)
            )
            shards = tensor if array_bytes and is_divided else 1
            flops += _FLOPS * tokens * math.prod(array.shape) / shards
            weight_bytes += array_bytes / shards
            if shards > 1:
                activation_bytes += tokens * array_bytes / array.long_side
                calls += 1

        fsdp = self._fsdp(tensor)
        # One column for each of the mesh axes data, fsdp and tensor.
        sizes = np.array([[groups // fsdp.size, fsdp.size, tensor]])
        slices = np.array([[self.hardware.slices // fsdp.slices, fsdp.slices, 1]])
        rates = rates_of(
            self.hardware.chip,
            self.hardware.total,
            MODEL,
            math.inf,
            extents=self.hardware.extents,
        )
        data_byte_seconds, fsdp_byte_seconds, tensor_byte_seconds = byte_seconds(
            rates, sizes, slices
        )[:, 0]
        latencies = rates["hop_seconds"] * hop_counts(rates, sizes, slices)[:, 0]
        compute_seconds = flops / rates["flops"]
        hidden_seconds = 2 * weight_bytes / fsdp.size * data_byte_seconds + latencies[0]
        gathering_seconds = _GATHERED * weight_bytes * fsdp_byte_seconds
        reducing_seconds = (
            _REDUCED * activation_bytes * tensor_byte_seconds + calls * latencies[2]
        )
        exposed_seconds = max(0.0, hidden_seconds - rates["overlap"] * compute_seconds)
        return float(
            compute_seconds + gathering_seconds + reducing_seconds + exposed_seconds
        )

    def _fsdp(self, tensor: int) -> Span:
        """The smallest span of FSDP that leaves a device enough memory, in groups of
        `tensor` devices; if none does, the largest.
        """
        spans = fsdp_spans(
            groups=self.hardware.total // tensor,
            slices=self.hardware.slices,
            island=switched_devices(self.hardware.chip) / tensor,
        )
        comfortable_bytes = self.comfortable_bytes(tensor)
        for span in spans:
            if self.state_bytes <= tensor * span.size * comfortable_bytes:
                return span
        return spans[-1]
