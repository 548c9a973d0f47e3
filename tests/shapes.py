"""The checker behind the import hook of conftest.py: the shapes and types that functions declare.

Functions within functions are left alone: each call of the outer one would write their checks anew.
Constructors are left alone: JAX rebuilds a pytree with whatever stands for its arrays, such as
specs and shapes, and the engine fills them with NumPy arrays on their way to the device.

jaxtyping's own decorator binds the arguments of every call and checks them twice, for the sake of
its messages; that was a third of the time of what traces much.
"""

import functools
import inspect
import typing

import jaxtyping
from beartype import BeartypeConf, beartype

# An int may stand for a float, as type checkers have it.
_typed = beartype(conf=BeartypeConf(is_pep484_tower=True))
_scope = jaxtyping.jaxtyped


def install(packages: list[str]) -> None:
    """Checks what the functions of packages that are imported from here on declare."""
    jaxtyping.jaxtyped = _jaxtyped
    jaxtyping.install_import_hook(packages, "tests.shapes.check")


def _jaxtyped(thing=None, *, typechecker=None):
    """Stands for jaxtyping's decorator in the modules that its hook loads."""
    if isinstance(thing, str):
        return _scope(thing)
    if thing is None:
        return functools.partial(_jaxtyped, typechecker=typechecker)
    return thing if inspect.isclass(thing) else typechecker(thing)


def check(function):
    """The function with its types checked; with its shapes, where it has any."""
    if function.__name__ == "__init__" or "<locals>" in function.__qualname__:
        return function
    declared = function.__annotations__
    function.__annotations__ = {name: _resolved(function, name) for name in declared}
    typed = _typed(function)
    if not any(_has_shape(hint) for hint in function.__annotations__.values()):
        return typed

    @functools.wraps(function)
    def checked(*args, **kwargs):
        with _scope("context"):
            return typed(*args, **kwargs)

    return checked


def _resolved(function, name):
    """Any for what only type checkers can import, and for classes that are not there yet."""
    one = type(name, (), {"__annotations__": {name: function.__annotations__[name]}})
    try:
        return typing.get_type_hints(one, function.__globals__, include_extras=True)[name]
    except Exception:
        return typing.Any


def _has_shape(hint) -> bool:
    is_array = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return is_array or any(map(_has_shape, typing.get_args(hint)))
