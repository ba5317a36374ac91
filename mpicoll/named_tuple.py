"""`NamedTuple` of :mod:`typing`, for classes that each start of a job makes.

That of typing compiles source code for each class and for each annotation, which takes ten times as long as the class
itself: a fifth of what a job's first call needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from operator import itemgetter

    class _NamedTupleType(type):
        """Type of classes whose annotations are the fields of a tuple, and whose values are their defaults."""

        def __new__(cls, name, bases, namespace):
            fields = tuple(namespace.get("__annotations__", ()))
            defaults = {one: namespace[one] for one in fields if one in namespace}
            getters = {one: property(itemgetter(at)) for at, one in enumerate(fields)}
            more = {"__slots__": (), "_fields": fields, "_field_defaults": defaults, "__match_args__": fields}
            return super().__new__(cls, name, bases, namespace | getters | more)

    class NamedTuple(tuple, metaclass=_NamedTupleType):
        """Base class of tuples with named fields."""

        def __new__(cls, *values, **named):
            if named or len(values) != len(cls._fields):
                values += cls._find_rest(len(values), named)
            return tuple.__new__(cls, values)

        @classmethod
        def _find_rest(cls, given, named):
            """Return the values of the fields after the first `given` ones."""
            rest = cls._fields[given:]
            known = cls._field_defaults | named
            wrong = [one for one in rest if one not in known] + [one for one in named if one not in rest]
            if wrong or given > len(cls._fields):
                raise TypeError(
                    f"{cls.__name__}({', '.join(cls._fields)}) got {given} positional values"
                    f" and {', '.join(named) or 'no others'}: {', '.join(wrong) or 'too many'}"
                )
            return tuple(known[one] for one in rest)

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
