"""Commands in this process."""

from click.testing import CliRunner

from sequoia_plan.planner.cli import main


def succeed(*words):
    """The result of a command, which must not fail."""
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result
