"""Clearing what the package remembers of arrays: plans of moves, programs, and the meshes and devices they hold."""

import functools as ft
import sys

import jax


_CACHED, _JITTED = type(ft.lru_cache(len)), type(jax.jit(len))


def clear_caches() -> None:
    """Forgets what was planned and compiled so far, and with it the devices, meshes and programs of earlier calls.

    After devices were lost, or between tests, nothing of the package keeps them alive then; JAX keeps caches of its
    own, which `jax.clear_caches()` clears. Results do not change: what is needed again is planned and compiled again.
    The programs of [`shardfx.filter_jit`][] are in JAX's caches, and what else such a function remembers goes with it.

    !!! Example

        ```python
        import jax
        import shardfx

        shardfx.clear_caches()
        jax.clear_caches()
        ```
    """
    package = __name__.partition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]
    for thing in [thing for module in modules for thing in vars(module).values()]:
        if isinstance(thing, _CACHED):
            thing.cache_clear()
        elif isinstance(thing, _JITTED):
            thing.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
