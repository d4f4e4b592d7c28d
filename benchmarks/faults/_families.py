"""Training steps of each family of models, under layouts that people use.

The models are those of the zoo, of the unseen steps and of the bank. A layer of the bank
becomes a training step: the gradients of all its floating-point arrays, and AdamW.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .. import _zoo
from ..unseen import _open, _sealed
from . import bank_attention, bank_convolution, bank_residual, bank_sequence
from ._layers import LAYERS, Layer, sized


# A step, and the structs that it takes.
Made = tuple[Any, tuple[Any, ...]]
# The spec of an array of the zoo, by its key and shape.
_SpecOf = Callable[[str, tuple[int, ...]], P]
_BANKS = (bank_attention, bank_convolution, bank_residual, bank_sequence)
_CASES = {case.name: case for case in (*_open.CASES, *_sealed.CASES)}
# The mesh of the zoo's models and of the bank's layers.
_SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
_BATCH = ("data", "fsdp")
_ALL = ("data", "fsdp", "tensor")
# The arrays of the zoo that a product takes row by row; others are cut by columns.
_ROWS = ("o", "down", "wo", "embedding")
# Sizes of the letters in the bank's arrays.
_LETTERS = {
    "b": 8,
    "t": 16,
    "s": 16,
    "d": 32,
    "f": 64,
    "h": 8,
    "k": 8,
    "v": 32,
    "c": 16,
    "o": 16,
    "y": 16,
    "x": 16,
    "e": 8,
    "n": 4,
    "g": 4,
    "r": 4,
}
# For each layout of the bank's layers, the mesh axes of each letter.
Axes = tuple[str, ...]
_BATCH_CUT: Mapping[str, Axes] = {
    "b": _BATCH,
    "d": ("fsdp",),
    "c": ("fsdp",),
    "f": ("tensor",),
    "h": ("tensor",),
    "o": ("tensor",),
    "e": ("tensor",),
}
_LENGTH_CUT: Mapping[str, Axes] = {
    "b": _BATCH,
    "t": ("tensor",),
    "s": ("tensor",),
    "y": ("tensor",),
    "16": ("tensor",),
    "8": ("tensor",),
    "d": ("fsdp",),
    "c": ("fsdp",),
}
_NODES_CUT: Mapping[str, Axes] = {
    "t": _BATCH,
    "d": ("fsdp",),
    "f": ("tensor",),
}
_EDGES_CUT: Mapping[str, Axes] = {"t": _ALL, "d": ("fsdp",), "f": ("tensor",)}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A training step under one layout.

    - `family`: the kind of model.
    - `name`, `layout`: which model, and how it is sharded.
    - `sizes`: the mesh, by axis.
    - `make`: makes the step on a mesh of these sizes.
    """

    family: str
    name: str
    layout: str
    sizes: Mapping[str, int]
    make: Callable[[Mesh], Made]


def subjects() -> list[Subject]:
    """All training steps, family by family."""
    return [
        *_zoo_models("decoder", "dense 1B"),
        *_zoo_models("decoder", "dense 8B, 8 of 32 heads for keys"),
        _unseen("decoder", "llama-scan-remat-fsdp-tensor"),
        _unseen("decoder", "decoder-window-context-parallel"),
        _unseen("decoder", "gpt2-vocabulary-50257"),
        *_zoo_models("MoE", "experts"),
        *_layers("MoE", "moe_dense", batch=_BATCH_CUT),
        *_layers("MoE", "moe_capacity", batch=_BATCH_CUT),
        _unseen("MoE", "switch-experts-dense-dispatch"),
        _unseen("MoE", "experts-all-to-all-by-shard-map"),
        *_zoo_models("ViT", "ViT"),
        *_layers("ViT", "vit_patches", batch=_BATCH_CUT, length=_LENGTH_CUT),
        _unseen("ViT", "vit-fused-qkv-equinox"),
        *_zoo_models("ResNet", "convolutions", spatial=True),
        *_layers("ResNet", "resnet_block", batch=_BATCH_CUT, length=_LENGTH_CUT),
        _unseen("ResNet", "resnet-nchw-spatial-group-norm"),
        *_zoo_models("U-Net", "U-Net", spatial=True),
        *_layers("U-Net", "unet", batch=_BATCH_CUT, length=_LENGTH_CUT),
        *_zoo_models("DiT", "DiT"),
        *_layers("DiT", "dit_block", batch=_BATCH_CUT, length=_LENGTH_CUT),
        *_layers("SSM", "mamba", batch=_BATCH_CUT, length=_LENGTH_CUT),
        *_layers("SSM", "selective_scan", batch=_BATCH_CUT),
        _unseen("SSM", "mamba-selective-associative-scan"),
        *_layers("GNN", "graph_convolution", nodes=_NODES_CUT, edges=_EDGES_CUT),
        *_layers("GNN", "graph_attention", nodes=_NODES_CUT),
        _unseen("GNN", "graph-network-edges-cut"),
        _unseen("GNN", "graph-attention-nodes-cut"),
        *_layers("LoRA", "lora", batch=_BATCH_CUT, length=_LENGTH_CUT),
        *_layers("LoRA", "lora_many", batch=_BATCH_CUT),
        _unseen("LoRA", "lora-frozen-bf16-base"),
        *_layers("KV cache", "decode", batch=_BATCH_CUT, length=_LENGTH_CUT),
        *_layers("KV cache", "decode_clipped", length=_LENGTH_CUT),
        *_layers("KV cache", "cache_rows", batch=_BATCH_CUT, length=_LENGTH_CUT),
        *_layers("KV cache", "cache_mapped", batch=_BATCH_CUT, length=_LENGTH_CUT),
        *_layers("KV cache", "cache_window", length=_LENGTH_CUT),
        _unseen("KV cache", "decode-dynamic-update-slice"),
        _unseen("KV cache", "generate-fori-loop-whole-cache"),
    ]


def _unseen(family: str, name: str) -> Subject:
    """An unseen step, which has a layout of its own."""
    case = _CASES[name]
    return Subject(
        family=family, name=name, layout="its own", sizes=case.cpu, make=case.make
    )


def _zoo_models(family: str, name: str, *, spatial: bool = False) -> list[Subject]:
    """A model of the zoo under FSDP, and under FSDP and tensor parallelism. `spatial`
    also cuts the height of images.
    """
    layouts = {"fsdp": _fsdp_spec, "fsdp x tensor": _tensor_spec}
    if spatial:
        layouts = {"fsdp": _fsdp_spec, "spatial": _fsdp_spec}
    models = []
    for layout, spec_of in layouts.items():
        make = ft.partial(_zoo_step, name, spec_of, layout == "spatial")
        models.append(
            Subject(family=family, name=name, layout=layout, sizes=_SIZES, make=make)
        )
    return models


def _zoo_step(name: str, spec_of: _SpecOf, is_spatial: bool, mesh: Mesh) -> Made:
    step, params, _, _, *batch = _zoo.small_models()[name]()

    def placed(path: Any, leaf: Any) -> Any:
        key = getattr(path[-1], "key", "")
        return _struct(mesh, leaf, spec_of(key, leaf.shape))

    state = jax.tree_util.tree_map_with_path(placed, params)
    data = []
    for leaf in batch:
        is_image = len(leaf.shape) == 4
        spec = P(_BATCH, "tensor") if is_spatial and is_image else P(_BATCH)
        data.append(_struct(mesh, leaf, spec))
    return _pinned(step, state, data)


def _fsdp_spec(key: str, shape: tuple[int, ...]) -> P:
    """The largest dimension over the axes of the batch."""
    del key
    divisible = [dim for dim, size in enumerate(shape) if size % 4 == 0]
    if not divisible:
        return P()
    largest = max(divisible, key=lambda dim: shape[dim])
    return P(*[None] * largest, _BATCH)


def _tensor_spec(key: str, shape: tuple[int, ...]) -> P:
    """Matrices by columns or by rows over `tensor`, and by FSDP along the other."""
    if len(shape) < 2:
        return P()
    pair = ("tensor", "fsdp") if key in _ROWS else ("fsdp", "tensor")
    return P(*[None] * (len(shape) - 2), *pair)


def _layers(family: str, name: str, **layouts: Mapping[str, Axes]) -> list[Subject]:
    """A layer of the bank as a training step, under layouts by letters."""
    steps = []
    for layout, axes in layouts.items():
        make = ft.partial(_layer_step, LAYERS[name], axes)
        steps.append(
            Subject(family=family, name=name, layout=layout, sizes=_SIZES, make=make)
        )
    return steps


def _layer_step(layer: Layer, axes: Mapping[str, Axes], mesh: Mesh) -> Made:
    params: dict[int, Any] = {}
    data: dict[int, Any] = {}
    operands = sized(layer, _LETTERS, gradient=False).operands
    for place, (operand, array) in enumerate(zip(operands, layer.arrays, strict=True)):
        dtype = jnp.int32 if operand.is_index else jnp.float32
        leaf = jax.ShapeDtypeStruct(operand.shape, dtype)
        spec = _letter_spec(array.partition(":")[0].split(), operand.shape, axes)
        is_trained = operand.values == "normal"
        arrays = params if is_trained else data
        arrays[place] = _struct(mesh, leaf, spec)

    def loss(params: Mapping[int, Any], *others: Any) -> Any:
        arrays = {**params, **dict(zip(data, others, strict=True))}
        result = layer.function(*[arrays[place] for place in sorted(arrays)])
        return jnp.mean(jnp.sin(result))

    step, state, *_ = _zoo.trained(loss, params, *data.values())
    return _pinned(step, state, list(data.values()))


def _letter_spec(
    tokens: Sequence[str], shape: tuple[int, ...], axes: Mapping[str, Axes]
) -> P:
    """The spec of an array whose dimensions are letters; a token such as `2*d` has the
    axes of its letter. An axis is used once.
    """
    used: set[str] = set()
    spec: list[Axes | None] = []
    for token, size in zip(tokens, shape, strict=True):
        names = axes.get(token.split("*")[-1], ())
        count = 1
        for name in names:
            count *= _SIZES[name]
        is_free = not used & set(names)
        if names and is_free and size % count == 0:
            spec.append(names)
            used |= set(names)
        else:
            spec.append(None)
    return P(*spec)


def _pinned(step: Any, state: Any, data: Sequence[Any]) -> Made:
    """A jitted step that leaves its state as it lies."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, out_shardings=(shardings, shardings, shardings))
    return jitted, (state, state, state, *data)


def _struct(mesh: Mesh, leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
