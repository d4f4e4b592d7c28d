"""Errors for calls, operations and attributes that a function or a value lacks. Each
says what to write instead.
"""

import dataclasses
import difflib
import functools as ft
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn, ParamSpec, TypeVar


P = ParamSpec("P")
R = TypeVar("R")


def called(form: str, **fixes: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The decorator of a function whose error for wrong arguments ends with a right
    call.

    **Arguments:**

    - `form`: the call, such as `load(path, plan)`.
    - `fixes`: by the name of an argument that the function lacks, and that users of
      other libraries pass, what to write instead.

    **Returns:**

    The decorator. The decorated function raises Python's `TypeError` for arguments that
    it does not take, with `form`, and with the fix or the similar name of the argument.
    """

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        @ft.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError) as error:
                # `errors.of_argument` marks the errors of wrong arguments.
                if vars(error).pop("is_of_argument", False) and form not in str(error):
                    error.args = (f"{error} Write `{form}`.",)
                # Not Python's error of arguments that the function does not take.
                if not isinstance(error, TypeError) or is_bound(function, args, kwargs):
                    raise
                hints = [_hint(function, name, fixes) for name in kwargs]
                message = "".join([str(error), *hints])
                raise TypeError(f"{message}; write `{form}`.") from None

        return call

    return decorator


def is_bound(
    function: Callable[..., object],
    args: Iterable[object],
    kwargs: Mapping[str, object],
) -> bool:
    """Whether a function takes these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _hint(function: Callable[..., object], name: str, fixes: Mapping[str, str]) -> str:
    """The text that says what stands for the argument `name` if the function lacks it;
    empty if it has it. `fixes` has, by such a name, what to write instead.
    """
    parameters = inspect.signature(function).parameters
    if name in parameters:
        return ""
    if name in fixes:
        return f" (in its place is {fixes[name]})"
    for similar in difflib.get_close_matches(name, parameters, n=1):
        return f" (did you mean `{similar}=`?)"
    # The public functions with `*args` take the arguments of a step there.
    if "args" in parameters:
        return " (what the step takes is given by position)"
    return ""


def refused(operation: str, fix: str) -> Callable[..., Any]:
    """A method for an operation that a class lacks. It raises `TypeError`.

    **Arguments:**

    - `operation`: the operation in code. `{}` stands for what it is given.
    - `fix`: what to write instead. `{}` stands for what the operation is given.
    """

    def method(self: object, *values: object) -> NoReturn:
        owner = self if isinstance(self, type) else type(self)
        # `with`, `len` and a call may give nothing.
        shown = _shown(values[0]) if values else ""
        raise TypeError(
            f"`{operation.format(shown)}`: {owner.__name__} does not support this;"
            f" write {fix.format(shown)}."
        )

    return method


def _shown(value: object) -> str:
    """The `repr` of a value, or its type if the `repr` is long."""
    text = repr(value)
    if len(text) > 60:
        return f"<{type(value).__name__}>"
    return text


def lacking(
    fixes: Mapping[str, str],
    fix_of: Callable[[Any, str], str] | None = None,
) -> Callable[[Any, str], NoReturn]:
    """A method `__getattr__`, which Python calls for an attribute that a value lacks.
    It raises `AttributeError`.

    **Arguments:**

    - `fixes`: by the name of an attribute, what to write instead.
    - `fix_of`: for other names, a function of the value and the name that returns
      what to write, or "".
    """

    def method(self: Any, name: str) -> NoReturn:
        """Raises the error for the attribute `name`, with what to write instead."""
        type_name = type(self).__name__
        head = f"{type_name!r} object has no attribute {name!r}"
        # Copying and pickling ask for such names of values without fields.
        if name.startswith("_") and name not in fixes:
            raise AttributeError(head)
        fix = fixes.get(name, "")
        if not fix and fix_of is not None:
            fix = fix_of(self, name)
        if not fix:
            for similar in difflib.get_close_matches(name, _public_names(self), n=1):
                fix = f"`.{similar}`"
        raise AttributeError(f"{head}; write {fix}" if fix else head)

    return method


# What to write for names that other libraries have.
_OF_OTHERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "make_mesh": "`MeshSpec({'data': 4, 'tensor': 2}).build(jax.devices())`",
        "Mesh": "`MeshSpec({'data': 4, 'tensor': 2}).build(jax.devices())`",
        "P": "`jax.P`",
        "PartitionSpec": "`jax.P`",
        "jit": "`filter_jit`",
        "save": "`checkpoint.save`",
        "load": "`checkpoint.load`",
        "estimate": "`cost.estimate`",
        "fit": "`cost.fit`",
        "traffic": "`cost.traffic`",
        "search": "`auto.search`",
        "check_step": "`testing.check_step`",
        "global_batch": "`hosts.global_batch`",
    }
)


def lacking_in(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """The error for an attribute that the package lacks. `names` are those that it has."""
    head = f"module {module!r} has no attribute {name!r}"
    fix = _OF_OTHERS.get(name, "")
    if not fix:
        for similar in difflib.get_close_matches(name, names, n=1):
            fix = f"`{similar}`"
    return AttributeError(f"{head}; write {fix}" if fix else head)


class Method:
    """A method whose text says what it is not, for errors of JAX that show it where the
    user meant another attribute.

    `text` is what to write.
    """

    def __init__(self, function: Callable[..., Any], text: str):
        self._function = function
        self._text = text
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self._function
        return _BoundMethod(self._function, instance, self._text)


@dataclasses.dataclass(frozen=True, repr=False)
class _BoundMethod:
    """A method of one value, whose `repr` ends with `text`."""

    function: Callable[..., Any]
    instance: object
    text: str

    def __post_init__(self) -> None:
        bound = types.MethodType(self.function, self.instance)
        for name in ("__name__", "__qualname__", "__doc__"):
            object.__setattr__(self, name, getattr(bound, name))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self.function, self.instance))

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.function(self.instance, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<the method `{self.function.__name__}`; {self.text}>"


def _public_names(value: object) -> list[str]:
    return [name for name in dir(type(value)) if not name.startswith("_")]
