"""`NamedTuple` of :mod:`typing`, for classes that each start of a job makes.

That of typing compiles source code for each class and for each annotation, which takes ten times as long as the class
itself: a fifth of what a job's first call needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from _collections import _tuplegetter

    class _NamedTupleType(type):
        """Type of classes whose annotations are the fields of a tuple, and whose values are their defaults."""

        def __new__(cls, name, bases, namespace):
            if bases and bases[0] is not tuple and bases[0]._fields:
                return super().__new__(cls, name, bases, namespace)  # a subclass has the fields of its base
            fields = tuple(namespace.get("__annotations__", ()))
            if bases and bases[0] is not tuple and not fields:
                raise TypeError(f"{name} has no fields: its module needs `from __future__ import annotations`")
            defaults = {one: namespace[one] for one in fields if one in namespace}
            # The values of the last fields, by how many of them there are.
            ends = {len(defaults) - at: tuple(defaults.values())[at:] for at in range(len(defaults))}
            getters = {one: _tuplegetter(at, f"Field {at}.") for at, one in enumerate(fields)}
            more = {"__slots__": (), "_fields": fields, "_field_defaults": defaults, "_ends": ends}
            return super().__new__(cls, name, bases, namespace | getters | more | {"__match_args__": fields})

    class NamedTuple(tuple, metaclass=_NamedTupleType):
        """Base class of tuples with named fields."""

        def __new__(cls, *values, **named):
            missing = len(cls._fields) - len(values)
            if missing or named:
                values += (
                    cls._find_rest(len(values), named) if named or missing not in cls._ends else cls._ends[missing]
                )
            return tuple.__new__(cls, values)

        @classmethod
        def _find_rest(cls, given, named):
            """Return the values of the fields after the first `given` ones."""
            rest = cls._fields[given:]
            defaults = cls._field_defaults
            try:
                values = tuple([named[one] if one in named else defaults[one] for one in rest])
            except KeyError as error:
                raise TypeError(f"{cls.__name__}({', '.join(cls._fields)}): no value for {error.args[0]}") from None
            if given > len(cls._fields) or not named.keys() <= set(rest):
                wrong = ", ".join(one for one in named if one not in rest) or "too many values"
                raise TypeError(f"{cls.__name__}({', '.join(cls._fields)}): {given} values by position, and {wrong}")
            return values

        def __getnewargs__(self):
            return tuple(self)

        def __repr__(self):
            fields = zip(self._fields, self, strict=True)
            return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields)})"

        @classmethod
        def _make(cls, values):
            return cls(*values)

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def _replace(self, **named):
            return type(self)(**(self._asdict() | named))


__all__ = ["NamedTuple"]
