"""The exceptions users meet."""


class SequoiaPlanError(Exception):
    """Something that cannot be done, told in one line: what it is, what was found, what was expected, what to do."""

    exit_code = 1


class ArgumentError(SequoiaPlanError):
    """The same for an invalid argument or option."""

    exit_code = 2
