"""YAML for people to edit: a key that occurs twice is refused, and so are aliases and tags.

`1e-5` and `.5` are numbers, `010` is ten, and `1:30` is text, unlike in YAML 1.1.
"""

import re
from typing import Any

import yaml

from sequoia_plan.artifacts.errors import SequoiaPlanError

NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$", re.ASCII)
NUMBER_TAG = "tag:yaml.org,2002:float"
OTHER_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("bool", "merge", "null")}


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, made strict."""

    def refuse(self) -> None:
        """Refuse aliases, a few of which can stand for a document without end, and tags."""
        problem = f"found {self.peek()}, expected neither aliases nor tags"
        raise yaml.scanner.ScannerError(problem=problem, problem_mark=self.get_mark())

    fetch_alias = fetch_tag = refuse

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Build the mapping of a node, unless a key occurs twice in it."""
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                problem = f"the key {key!r:.40} occurs twice; keep one of them"
                mark = key_node.start_mark
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=mark)
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        """Build a whole number from digits alone, and a float from all others."""
        text = node.value
        return int(text) if text.lstrip("+-").isdigit() else float(text)


class Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes texts that are numbers here, as a digest 12e4."""


Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] in OTHER_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for side in (Loader, Dumper):
    side.add_implicit_resolver(NUMBER_TAG, NUMBER, list("-+.0123456789"))
Loader.add_constructor(NUMBER_TAG, Loader.construct_number)


def dump(document: Any) -> str:
    """A document as YAML text."""
    return yaml.dump(document, None, Dumper, sort_keys=False, default_flow_style=None, width=100)


def load(data: bytes, name: str, expected: str) -> Any:
    """Parse the single YAML document in a file's content."""
    try:
        return yaml.load(data, Loader=Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise SequoiaPlanError(
            f"{name}: cannot be read as YAML{place} ({problem}); expected {expected}"
        ) from error
