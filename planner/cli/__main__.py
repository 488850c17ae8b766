"""`python -m sequoia_plan.planner.cli`."""

from sequoia_plan.planner.cli import main

main(prog_name="sequoia-plan")
