"""YAML with less surprise: a key that occurs twice is refused, 1e-5 is a number, 1:30 is text; deep nesting and aliases are refused.

Files of artifacts begin with their `format` and `version`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.facts import DEEPEST
from sequoia_plan.artifacts.schema import S

INTEGER = re.compile(r"^[-+]?[0-9]+$")
NUMBER = re.compile(r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")
REPLACED = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class Format(NamedTuple):
    """What a kind of file says of itself, and what errors call it.

    Args:
        name, version: what its keys `format` and `version` hold.
        what: as in "not a profile".
        short: as in "profile version 2".
        again: what makes a file of this version.
    """

    name: str
    version: int
    what: str
    short: str
    again: str


def dump(document: Any, width: int) -> str:
    """The text of `document`, in lines of about `width` characters; equal content, equal text."""
    import yaml  # here, because the runtime never needs it

    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})  # an alias would tell which parts are one object
    return yaml.dump(document, Dumper=dumper, sort_keys=False, default_flow_style=None, width=width)


def read(cls: type[S], data: bytes, name: str, expected: str, form: Format) -> S:
    """The artifact of the format `form` in `data`; `name` and `expected` are as for `load`.

    Raises:
        SequoiaPlanError: if it is not YAML, not of this format and version, or holds what the artifact cannot have.
    """
    document = load(data, name, expected)
    if not isinstance(document, dict) or document.get("format") != form.name:
        raise SequoiaPlanError(f"{name}: not {form.what} (expected `format: {form.name}`)")
    if document.get("version") != form.version or isinstance(document["version"], bool):
        raise SequoiaPlanError(f"{name}: {form.short} version {document.get('version')!r:.60}, expected {form.version}; {form.again} with this sequoia-plan")
    try:
        return cls.read(document, "")
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{name}: {error}") from error


def load(data: bytes, name: str, expected: str) -> Any:
    """The one document in `data`; `name` says which file in errors, and `expected` what it should hold.

    Raises:
        SequoiaPlanError: if it is not YAML, a key stands twice, or it is nested too deep or holds aliases.
    """
    import yaml  # here, because the runtime never needs it

    try:
        _check_layout(data, name, expected)
        return yaml.load(data, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or ""
        where = f" at line {mark.line + 1}" if mark else ""
        if "stands twice" in problem:
            raise SequoiaPlanError(f"{name}: {problem}{where}; keep one of them") from error
        raise SequoiaPlanError(f"{name}: not YAML{where}; expected {expected}") from error


@lru_cache(maxsize=1)
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for place, key in enumerate(keys):
                if key in keys[:place]:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key!r:.40} stands twice", node.value[place][0].start_mark)
            return super().construct_mapping(node, deep)

    kept = {first: [each for each in resolvers if each[0] not in REPLACED] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    Loader.yaml_implicit_resolvers = kept
    Loader.add_implicit_resolver(REPLACED[0], INTEGER, list("-+0123456789"))
    Loader.add_implicit_resolver(REPLACED[1], NUMBER, list("-+.0123456789"))
    return Loader


def _check_layout(data: bytes, name: str, expected: str) -> None:
    """Refuse deep nesting and aliases while the text is only scanned: loading them can take minutes, or memory without end."""
    import yaml

    nested = 0
    for token in yaml.scan(data, Loader=yaml.SafeLoader):
        nested += type(token).__name__.endswith(("SequenceStartToken", "MappingStartToken"))
        nested -= isinstance(token, (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken))
        if nested > 2 * DEEPEST:
            raise SequoiaPlanError(f"{name}: nested deeper than {2 * DEEPEST} levels; expected {expected}")
        if isinstance(token, yaml.AliasToken):
            raise SequoiaPlanError(f"{name}: holds the YAML alias *{token.value}; write the value itself")
