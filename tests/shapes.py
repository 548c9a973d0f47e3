"""The checker behind the import hook of conftest.py: the shapes and types that functions declare.

Constructors are left alone: JAX rebuilds a pytree with whatever stands for its arrays, such as
specs and shapes, and the engine fills them with NumPy arrays on their way to the device.
"""

from beartype import BeartypeConf, beartype

# An int may stand for a float, as type checkers have it.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    return function if function.__name__ == "__init__" else _checked(function)
