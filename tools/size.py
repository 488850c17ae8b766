"""Count the code by folder and compare it with the budget in pyproject.toml: make size."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def docstring_lines(source: str) -> set[int]:
    """The numbers of the lines that docstrings take, those under attributes included."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.update(range(statement.lineno, statement.end_lineno + 1))
    return lines


def python_size(source: str) -> Counter[str]:
    """Tokens of code, lines, and lines that are docstrings or nothing but a comment."""
    prose = docstring_lines(source)
    size = Counter(lines=len(source.splitlines()), longest=len(source.splitlines()))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            prose.add(token.start[0])
        elif token.type not in LAYOUT_TOKENS and token.start[0] not in prose:
            size["tokens"] += 1
    size["prose"] = len(prose)
    return size


def folder_sizes(folders: list[str]) -> dict[str, Counter[str]]:
    """The sizes of the files that git does not ignore; Markdown counts lines alone."""
    sizes: dict[str, Counter[str]] = {}
    for folder in folders:
        total: Counter[str] = Counter()
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        for name in listed.stdout.split():
            path = Path(name)
            if not path.is_file() or path.is_symlink():
                continue
            if path.suffix == ".py":
                size = python_size(path.read_text("utf-8"))
                longest = max(total["longest"], size.pop("longest"))
                total += size
                total["longest"] = longest
            elif path.suffix == ".md":
                total["lines"] += len(path.read_text("utf-8").splitlines())
            elif path.suffix == ".json":
                total["results"] += 1
        sizes[folder] = total
    return sizes


def main() -> int:
    """Print the table; 1 if a figure is above its budget, else 0."""
    budget = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["tool"]["size"]
    sizes = folder_sizes(
        sorted({folder for group in budget.values() for folder in group["folders"]})
    )
    columns = ("tokens", "lines", "prose", "longest", "results")
    print(f"{'':22}" + "".join(f"{column:>10}" for column in columns))
    is_over = False
    for name, group in budget.items():
        total: Counter[str] = Counter()
        for folder in group["folders"]:
            size = sizes[folder]
            longest = max(total["longest"], size["longest"])
            total += size
            total["longest"] = longest
            if len(group["folders"]) > 1:
                print(f"  {folder:20}" + "".join(f"{size[column]:10,}" for column in columns))
        print(f"{name:22}" + "".join(f"{total[column]:10,}" for column in columns))
        for column in columns:
            limit = group.get(column)
            if limit is not None and total[column] > limit:
                print(f"{name}: found {total[column]:,} {column}, expected at most {limit:,}")
                is_over = True
    return is_over


if __name__ == "__main__":
    sys.exit(main())
