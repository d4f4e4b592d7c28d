"""Every signature of the package is checked while tests run.

jaxtyping's own hook wraps each function twice, binds the arguments of each call, and checks them before and after it:
`search` took eight times as long. Here beartype checks a function once, and jaxtyping is asked where an annotation
names arrays, since it alone compares the dimensions of several arguments.
"""

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jax._src import source_info_util


_MARK = "__checked__"
_NOWHERE = "<checks of calls>"
# One kind of error, a `TypeError` as Python's own are.
_check: Any = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def checked(made: Any) -> Any:
    """This function, or this dataclass, so that each call is checked against its annotations."""
    if not inspect.isclass(made):
        return _checked_function(made)
    if dataclasses.is_dataclass(made):
        made.__init__ = _checked_function(made.__init__)
    return made


def _checked_function(function: Any) -> Any:
    if _MARK in vars(function):
        return function
    # jaxtyping marks no function; what it has checked is checked once more, to the same end.
    if any(map(_names_arrays, function.__annotations__.values())):
        return jaxtyping.jaxtyped(function, typechecker=_check)
    check = _check(function)
    if check is function:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        # Tests of messages turn jaxtyping's checks off, and these with them.
        return (function if jaxtyping.config.jaxtyping_disable else check)(*args, **kwargs)

    # To those who read tracebacks it is no line of a user's program.
    call.__code__ = call.__code__.replace(co_filename=_NOWHERE)
    setattr(call, _MARK, True)
    return functools.wraps(function)(call)


def _names_arrays(hint: Any) -> bool:
    # Names in quotes may be unknown while tests run; jaxtyping leaves out those that it cannot find.
    if isinstance(hint, str | typing.ForwardRef):
        return True
    if isinstance(hint, list | tuple):
        return any(map(_names_arrays, hint))
    return type(hint).__module__.startswith("jaxtyping") or any(map(_names_arrays, typing.get_args(hint)))


class _Marker(ast.NodeTransformer):
    """Puts the check innermost on functions, where it sees their annotations, and outermost on classes."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list.append(ast.copy_location(ast.Name(_MARK, ast.Load()), node))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, ast.copy_location(ast.Name(_MARK, ast.Load()), node))
        return self.generic_visit(node)


class Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        tree = _Marker().visit(ast.parse(self.get_data(self.path)))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)[_MARK] = checked
        super().exec_module(module)


@dataclasses.dataclass(frozen=True)
class _Finder(MetaPathFinder):
    package: str

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def check_every_call_of(package: str) -> None:
    """From now on the modules of this package are imported so."""
    assert package not in sys.modules, f"{package} was imported before its calls could be checked"
    # The lines of a program are the user's, as without the checks. JAX has no public word for this.
    for file in (__file__, _NOWHERE, "<@beartype("):
        source_info_util.register_exclusion(file)
    sys.meta_path.insert(0, _Finder(package))
