"""What must be refused."""

import pytest

from sequoia_plan.artifacts import SequoiaPlanError


def refusal(message):
    """A context that must end with our error, whose message has this regular expression."""
    return pytest.raises(SequoiaPlanError, match=message)
