"""The exceptions that users meet."""


class SequoiaPlanError(Exception):
    """The request cannot be carried out.

    The message is one line: what was asked, what was found, what was expected, and what to do.
    """

    exit_code = 1


class ArgumentError(SequoiaPlanError):
    """An argument or a command line option is invalid. The message is as in `SequoiaPlanError`."""

    exit_code = 2
