"""Commands in this process."""

import json

from click.testing import CliRunner

from sequoia_plan.artifacts import Acceptance, Latency, Profile
from sequoia_plan.engines.plan import EnginePlan
from sequoia_plan.planner.cli import main

LATENCY = Latency({1: 0.04, 4: 0.042, 16: 0.05}, {1: 0.003, 16: 0.004}, 0.001, 128)
PROFILE = Profile(Acceptance.given((0.5, 0.125, 0.05)), LATENCY)


def call(*words, **options):
    """The result of a command."""
    return CliRunner().invoke(main, [*map(str, words)], **options)


def succeed(*words):
    """The result of a command, which must not fail."""
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result


def engine_plan(result):
    """The plan for an engine that a command printed as JSON."""
    return EnginePlan.from_dict(json.loads(result.stdout), "plan")


def refused(result, code, *parts):
    """The command failed with `code`, and its last line holds all `parts`."""
    line = result.stderr.strip().splitlines()[-1]
    assert result.exit_code == code and "Traceback" not in result.output, result.output
    assert all(part in line for part in parts), line
