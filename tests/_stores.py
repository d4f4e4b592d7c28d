"""Stores of chunks, written by the libraries that own their formats."""

import json
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts


def zarr(
    directory, path, array, *, chunks, driver="zarr", ocdbt=False, metadata=None
) -> Any:
    base = {
        "driver": "file",
        "path": f"{directory}/" if ocdbt else f"{directory}/{path}/",
    }
    if ocdbt:
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
    else:
        kvstore = base
    spec = {"driver": driver, "kvstore": kvstore} | (
        {"metadata": metadata} if metadata else {}
    )
    layout = ts.ChunkLayout(write_chunk_shape=chunks)
    store = ts.open(
        spec,
        create=True,
        dtype=ts.dtype(array.dtype),
        shape=array.shape,
        chunk_layout=layout,
    ).result()
    store.write(array).result()
    return store.kvstore


def orbax(path, tree, **how):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)) as writer:
        writer.save(path, args=ocp.args.PyTreeSave(tree))


def eformer(directory, **content):
    encoded = json.dumps({"format": "tensorstore", **content})
    (directory / "tensorstore_index.json").write_text(encoded)
