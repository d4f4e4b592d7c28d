"""What compilers make of every case: `python -m benchmarks.unseen.measure cpu|v5e`,
saved after each, so it resumes.
"""

import argparse
import gzip
import importlib.metadata
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from shardfx.cost import traffic

from . import _open, _sealed, singles
from ._case import Case


RESULTS = Path(__file__).parents[1] / "results"
GROUPS = {"open": _open.CASES, "sealed": _sealed.CASES, "single": singles.CASES}
MEMORY = ("argument", "output", "alias", "temp", "peak")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("platform", choices=("cpu", "v5e"))
    parser.add_argument(
        "--hlo", type=Path, help="a folder for the compiled programs' text"
    )
    parser.add_argument("--sealed-hlo", type=Path, help="the same for the sealed half")
    parser.add_argument(
        "--again", nargs="*", default=[], help="names of cases to measure again"
    )
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    file = RESULTS / f"unseen-{flags.platform}.json"
    document = (
        json.loads(file.read_text())
        if file.exists()
        else {"versions": versions(), "cases": {}}
    )
    devices = list_devices(flags.platform)
    for group, cases in GROUPS.items():
        for case in cases:
            if case.name in document["cases"] and case.name not in flags.again:
                continue
            began = time.perf_counter()
            record, text = measured(case, flags.platform, devices)
            seconds = round(time.perf_counter() - began, 2)
            document["cases"][case.name] = {
                "group": group,
                **record,
                "seconds": seconds,
            }
            file.write_text(json.dumps(document, indent=1) + "\n")
            folder = flags.sealed_hlo if group == "sealed" else flags.hlo
            if folder and text:
                keep(folder / flags.platform / f"{case.name}.txt.gz", text)
            print(
                f"{case.name}: {record.get('wire_bytes', record.get('error'))},"
                f" {seconds} s",
                flush=True,
            )


def versions() -> dict[str, str]:
    return {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "libtpu", "optax", "equinox", "flax")
    }


def list_devices(platform: str) -> list[Any]:
    if platform == "cpu":
        return jax.devices()
    return list(
        topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    )


def measured(
    case: Case, platform: str, devices: list[Any]
) -> tuple[dict[str, Any], str]:
    """The numbers of one case, or its error, and the compiled program's text."""
    sizes = getattr(case, platform)
    shaped = np.array(devices[: math.prod(sizes.values())]).reshape(
        tuple(sizes.values())
    )
    mesh = Mesh(shaped, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    record: dict[str, Any] = {"mesh": dict(sizes)}
    text = ""
    try:
        jitted, arguments = case.make(mesh)
        lowered = jitted.trace(*arguments).lower(
            lowering_platforms=("cpu" if platform == "cpu" else "tpu",)
        )
        began = time.perf_counter()
        compiled = lowered.compile()
        record["compile_seconds"] = round(time.perf_counter() - began, 2)
        text = compiled.as_text() or ""
        analysis = compiled.memory_analysis()
        record["memory_bytes"] = {
            name: getattr(analysis, f"{name}_size_in_bytes")
            for name in MEMORY
            if name != "peak"
        }
        record["memory_bytes"]["peak"] = analysis.peak_memory_in_bytes
        sent = traffic(compiled)
        record |= {
            "wire_bytes": sent.wire_bytes,
            "rows": len(sent.rows),
            "by_kind": sent.by("kind"),
        }
    except Exception as error:
        # A compiler's or a reader's failure is a result, too.
        record["error"] = f"{type(error).__name__}: {str(error)[:2000]}"
    return record, text


def keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.write(text)


if __name__ == "__main__":
    main()
