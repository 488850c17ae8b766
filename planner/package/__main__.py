"""`python -m sequoia_plan`."""

from sequoia_plan.planner.cli import main

main(prog_name="sequoia-plan")
