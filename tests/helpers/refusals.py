"""What must be refused."""

import pytest

from sequoia_plan.artifacts import SequoiaPlanError


def refusal(message, kind=SequoiaPlanError):
    """A context that must end with an error of ours, whose message has this regular expression."""
    return pytest.raises(kind, match=message)
