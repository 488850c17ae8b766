"""YAML with fewer surprises, and artifacts in it.

A key that occurs twice is refused, and so are deep nesting and aliases. `1e-5` is a number, and
`1:30` is text. Files of artifacts begin with their `format` and `version`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.metadata import MAX_NESTING
from sequoia_plan.artifacts.schema import S

INTEGER = re.compile(r"^[-+]?[0-9]+$")
NUMBER = re.compile(
    r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
INTEGER_TAG, NUMBER_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
MAX_FILE_NESTING = 2 * MAX_NESTING
"""A file has metadata within sections of its own."""


class Format(NamedTuple):
    """A file format, and the words that errors use for it."""

    name: str
    version: int
    with_article: str
    title: str
    remedy: str


def dump(document: Any, width: int) -> str:
    """The YAML text of a document; equal documents give equal text."""
    import yaml  # here, because the runtime never needs it

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            """Write an object that occurs twice in full both times.

            With aliases, the text of equal documents would depend on which parts are one object.
            """
            return True

    return yaml.dump(document, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=width)


def read(cls: type[S], data: bytes, name: str, expected: str, file_format: Format) -> S:
    """Read and check an artifact."""
    document = load(data, name, expected)
    if not isinstance(document, dict) or document.get("format") != file_format.name:
        raise SequoiaPlanError(
            f"{name}: not {file_format.with_article} (expected `format: {file_format.name}`)"
        )
    version = document.get("version")
    if version != file_format.version or isinstance(version, bool):
        raise SequoiaPlanError(
            f"{name}: {file_format.title} version {version!r:.60}, expected {file_format.version}; "
            f"{file_format.remedy} with this sequoia-plan"
        )
    try:
        return cls.from_dict(document, "")
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{name}: {error}") from error


def load(data: bytes, name: str, expected: str) -> Any:
    """Parse the single YAML document in a file's content."""
    import yaml  # here, because the runtime never needs it

    try:
        _check_layout(data, name, expected)  # raises for deep nesting and for aliases
        return yaml.load(data, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or ""
        where = f" at line {mark.line + 1}" if mark else ""
        if "stands twice" in problem:  # the loader's own error for a duplicate key
            raise SequoiaPlanError(f"{name}: {problem}{where}; keep one of them") from error
        raise SequoiaPlanError(f"{name}: not YAML{where}; expected {expected}") from error


@lru_cache(maxsize=1)
def _loader() -> Any:
    """The safe loader of PyYAML, with three changes.

    A key that occurs twice in a mapping is refused. Text is a number only if it matches INTEGER or
    NUMBER: `1e-5` is one, and `1:30` and `1_000` are not. Whole numbers are decimal: `010` is 10.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """Build the mapping of a node, unless a key occurs twice in it."""
            keys = [self.construct_object(key_node, deep=True) for key_node, _ in node.value]
            for index, key in enumerate(keys):
                if key in keys[:index]:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key!r:.40} stands twice",
                        problem_mark=node.value[index][0].start_mark,
                    )
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first_character: [
            resolver for resolver in resolvers if resolver[0] not in (INTEGER_TAG, NUMBER_TAG)
        ]
        for first_character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    # PyYAML's own constructor takes a leading zero for octal, as in YAML 1.1
    Loader.add_constructor(INTEGER_TAG, lambda _, node: int(str(node.value)))
    Loader.add_implicit_resolver(INTEGER_TAG, INTEGER, list("-+0123456789"))
    Loader.add_implicit_resolver(NUMBER_TAG, NUMBER, list("-+.0123456789"))
    return Loader


def _check_layout(data: bytes, name: str, expected: str) -> None:
    """Refuse deep nesting and aliases before the document is loaded.

    Loading such a document could take minutes, or memory without limit. The text is only split into
    YAML's tokens here, in which the start and the end of each list and mapping is a token.
    """
    import yaml

    closing_tokens = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
    nesting = 0
    for token in yaml.scan(data, Loader=yaml.SafeLoader):
        if type(token).__name__.endswith(("SequenceStartToken", "MappingStartToken")):
            nesting += 1
        elif isinstance(token, closing_tokens):
            nesting -= 1
        if nesting > MAX_FILE_NESTING:
            raise SequoiaPlanError(
                f"{name}: nested deeper than {MAX_FILE_NESTING} levels; expected {expected}"
            )
        if isinstance(token, yaml.AliasToken):
            raise SequoiaPlanError(
                f"{name}: holds the YAML alias *{token.value}; write the value itself"
            )
