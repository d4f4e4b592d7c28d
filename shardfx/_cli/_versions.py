"""The text of `shardfx --version`, and what `--verbose` adds to it."""

import importlib.metadata
import platform

import shardfx


_LIBRARIES = (
    "jax",
    "jaxlib",
    "libtpu",
    "equinox",
    "jaxtyping",
    "numpy",
    "optax",
    "flax",
    "orbax-checkpoint",
    "tensorstore",
)


def version_text() -> str:
    """The version of shardfx as text."""
    return f"shardfx, version {shardfx.__version__}"


def verbose_text() -> str:
    """The versions of shardfx, Python and the libraries beside it, the operating system
    and JAX's devices, one on a line.
    """
    lines = [
        version_text(),
        f"python {platform.python_version()}",
        f"system {platform.platform()}",
    ]
    for library in _LIBRARIES:
        lines.append(f"{library} {_version(library)}")
    lines.append(f"devices {_devices()}")
    return "\n".join(lines)


def _version(library: str) -> str:
    """The installed version of a library as text."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    """JAX's devices as text, or the error for which JAX has none."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return f"none: {error}"
    kinds = sorted({device.device_kind for device in devices})
    return f"{len(devices)} x {', '.join(kinds)} ({jax.default_backend()})"
