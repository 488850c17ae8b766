"""The errors of other libraries, as our messages quote them."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    return str(error).strip().split("\n")[0][:200]
