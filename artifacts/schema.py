"""Artifacts: structs that files hold, checked by msgspec while a file is read."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from msgspec import NODEFAULT, Meta, Struct, ValidationError

from sequoia_plan.artifacts.errors import SequoiaPlanError

Size = Annotated[int, Meta(ge=1, lt=2**53)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Number = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=1e-12, le=1e12)]
Metadata = dict[str, Any]
"""Plain values by name: see `is_plain`."""
MAX_NESTING = 16
"""Levels of lists and mappings within each other."""


class Artifact(Struct, frozen=True, repr_omit_defaults=True):
    """A struct that a file holds.

    Text in the annotation of a field says what it means; tools/format_tables.py writes it into
    docs/format.md.
    """

    @classmethod
    def from_dict(cls, document: Any, name: str) -> Self:
        """Check a file's mapping and convert it; errors begin with `name`. Other keys are ignored.

        Raises:
            SequoiaPlanError: naming the key, and what was expected.
        """
        for key, value in document.items() if isinstance(document, Mapping) else ():
            if not is_plain({key: value}):
                place = ascii(str(key))[1:-1]
                raise SequoiaPlanError(
                    f"{name}: {place:.40}: expected printable text, finite numbers, true, false, "
                    f"null, or lists and mappings of these, at most {MAX_NESTING} levels deep"
                )
        try:
            return msgspec.convert(document, cls, str_keys=True, dec_hook=_from_file)
        except ValidationError as error:
            raise refusal(error, name) from error
        except SequoiaPlanError as error:  # raised by a __post_init__
            raise SequoiaPlanError(f"{name}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The file's mapping of plain lists, mappings, numbers and text, without default values."""
        document = {}
        for spec in msgspec.structs.fields(self):
            value, default = getattr(self, spec.name), spec.default
            if spec.default_factory is not NODEFAULT:
                default = spec.default_factory()
            if value != default:
                document[spec.encode_name] = _plain(value)
        return document


def check_format(document: Any, name: str, version: int, place: str, made_by: str) -> None:
    """Refuse a document that does not name this format and version."""
    header = document if isinstance(document, Mapping) else {}
    # true and 1.0 are equal to 1
    if repr((header.get("format"), header.get("version"))) != repr((name, version)):
        stated = "no format"
        if "format" in header:
            stated = f"format {header['format']!r:.40}, version {header.get('version')!r:.20}"
        raise SequoiaPlanError(
            f"{place}: found {stated}, expected {name}, version {version}; make it with {made_by} "
            "of this sequoia-plan"
        )


def refusal(error: ValidationError, name: str) -> SequoiaPlanError:
    """The error for a file that does not hold what it should: where, and what msgspec expected."""
    # such as "Expected ... - at `$[1].trials` - at `$.acceptance`": the inner place is the first
    problem, *places = str(error).split(" - at ")
    key = "".join(re.sub(r"[`$]+\.?", "", place) for place in reversed(places))
    parts = [name, key, problem[0].lower() + problem[1:]]
    return SequoiaPlanError(": ".join(filter(None, parts)) + "; docs/format.md lists the keys")


def is_plain(value: Any, levels: int = MAX_NESTING) -> bool:
    """Whether a value can be written as JSON, and printed without steering a terminal."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return levels > 0 and all(is_plain(item, levels - 1) for item in value)
    if isinstance(value, str):
        return value.isprintable()
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, int)


def _from_file(cls: Any, value: Any) -> Any:
    """Read a value whose type has its own form in files, such as `Acceptance`."""
    try:
        return cls.from_file(value)
    except (SequoiaPlanError, ValidationError) as error:
        raise ValueError(str(error)) from error  # msgspec then adds where


def _plain(value: Any) -> Any:
    """Structs and mappings as mappings, tuples as lists, numbers of numpy as Python's."""
    if isinstance(value, Artifact):
        return value.to_dict()
    if hasattr(value, "to_file"):
        return _plain(value.to_file())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
