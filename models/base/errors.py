"""The errors of other libraries, as our messages quote them."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    return str(error).strip().split("\n")[0][:200]


def one_line(error: BaseException) -> str:
    """An error's message in one line of at most 300 characters, without a heading."""
    lines = str(error).split("\n")
    return " ".join(" ".join(lines[1:] or lines).split())[:300]
