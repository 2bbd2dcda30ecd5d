"""The base of every plan: a frozen dataclass that is one readable JSON file.

A plan is made once, read by people, kept under version control and run later, perhaps elsewhere. It therefore names its
schema and version, refuses files of another, and has a fingerprint that any change of its content changes. Fields may
hold numbers, strings, booleans, ``None``, lists, tuples, dicts with string keys, other dataclasses, and numpy or torch
scalars and arrays, which become plain numbers and lists.

Callers may not assume that a numpy array comes back as one: annotate such a field ``list``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from core_kernels.errors import ArgumentError, ArgumentTypeError, argument_error

__all__ = ["PlanDocument"]


@dataclasses.dataclass(frozen=True)
class PlanDocument:
    """A frozen dataclass that is saved to and loaded from one JSON file.

    Sub-classes are frozen dataclasses; they set ``schema`` (once and for all) and ``version`` (raised whenever a field
    changes its meaning). Nested dataclasses, lists, tuples and dicts of them are rebuilt from the annotations.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Route(PlanDocument):
    ...     schema: ClassVar[str] = "demo.route"
    ...     version: ClassVar[int] = 2
    ...     hops: tuple[int, ...]
    >>> plan = Route(hops=(3, 1))
    >>> plan.to_json()
    '{"schema": "demo.route", "version": 2, "hops": [3, 1]}'
    >>> Route.from_json(plan.to_json()) == plan
    True
    """

    schema: ClassVar[str] = ""
    version: ClassVar[int] = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, schema and version first."""
        return {"schema": self.schema, "version": self.version, **_plain(self, type(self).__name__)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Rebuild a plan from :meth:`to_dict`'s result.

        Args:
            document: The plan as plain values.

        Raises:
            ArgumentError: Another schema or version, or fields that are missing or unknown.
        """
        if not isinstance(document, Mapping) or document.get("schema") != cls.schema:
            found = document.get("schema") if isinstance(document, Mapping) else type(document).__name__
            raise argument_error(
                "schema", found, f"{cls.schema!r}, the schema of {cls.__name__}", "load the file with its own class"
            )
        if document.get("version") != cls.version:
            raise argument_error(
                "version",
                document.get("version"),
                f"{cls.version}, the version of {cls.schema} this release reads",
                "make the plan again",
            )
        fields = {name: value for name, value in document.items() if name not in ("schema", "version")}
        return _rebuild(cls, fields, cls.schema)

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON text; numbers that are not finite are written as ``Infinity`` and ``NaN``."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild a plan from :meth:`to_json`'s result.

        Raises:
            ArgumentError: The text is no JSON, or no plan of this class.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ArgumentError(
                f"text is not JSON ({error}); expected a saved {cls.__name__}; make the plan again"
            ) from None
        return cls.from_dict(document)

    def save(self, path: str | Path) -> Path:
        """Write the plan to ``path``, in one step so that readers never see half of it; returns the path."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(self.to_json(indent=1) + "\n")
        return partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan written by :meth:`save`.

        Raises:
            ArgumentError: The file is no plan of this class; the message names it.
            FileNotFoundError: There is no such file.
        """
        text = Path(path).read_text()
        try:
            return cls.from_json(text)
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from None

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that depend on schema, version and every field."""
        canonical = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def _plain(value: Any, where: str) -> Any:
    """Return ``value`` as JSON values; ``where`` names it in errors."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name), f"{where}.{field.name}")
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ArgumentTypeError(
                    f"{where} has the key {key!r}; expected text, as JSON has no other keys; use str(key)"
                )
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    to_list = getattr(value, "tolist", None)
    if to_list is not None:  # numpy and torch, scalars and arrays
        return to_list()
    raise ArgumentTypeError(
        f"{where} holds a {type(value).__name__}; expected numbers, text, lists, dicts or dataclasses; "
        "convert it before making the plan"
    )


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError:  # a class made inside a function refers to names that are not global: leave its values as read
        return {}


def _rebuild(cls: Any, fields: Mapping[str, Any], where: str) -> Any:
    """Make the dataclass ``cls`` from plain values."""
    known = {field.name: field for field in dataclasses.fields(cls) if field.init}
    unknown = sorted(set(fields) - set(known))
    no_default = dataclasses.MISSING
    missing = sorted(
        name
        for name, field in known.items()
        if name not in fields and field.default is no_default and field.default_factory is no_default
    )
    if unknown or missing:
        problem = f"unknown {unknown}" if unknown else f"missing {missing}"
        raise argument_error(where, problem, f"the fields {sorted(known)}", "make the plan again")
    hints = _annotations(cls)
    return cls(**{name: _typed(value, hints.get(name), f"{where}.{name}") for name, value in fields.items()})


def _typed(value: Any, hint: Any, where: str) -> Any:
    """Give plain values the containers and dataclasses that ``hint`` asks for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        choices = [argument for argument in arguments if argument is not type(None)]
        return value if value is None or len(choices) != 1 else _typed(value, choices[0], where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return _rebuild(hint, value, where)
    if isinstance(value, list):
        container = origin or hint
        if container is tuple:
            if arguments and arguments[-1] is not Ellipsis:
                if len(value) != len(arguments):
                    raise argument_error(where, value, f"{len(arguments)} values", "make the plan again")
                return tuple(_typed(item, argument, where) for item, argument in zip(value, arguments, strict=True))
            return tuple(_typed(item, arguments[0] if arguments else None, where) for item in value)
        return [_typed(item, arguments[0] if arguments else None, where) for item in value]
    if isinstance(value, Mapping) and len(arguments) == 2:
        return {key: _typed(item, arguments[1], where) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
