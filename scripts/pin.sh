#!/usr/bin/env bash
# Writes constraints.txt: the newest versions that all five packages and the development tools can share, for every
# platform. Pass uv's options to move on purpose, such as `--upgrade` or `--upgrade-package rich`.
#
# find-links is cleared, or a local build such as torch 2.13.0+cpu would be pinned, which other machines cannot install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

env -u UV_FIND_LINKS .venv/bin/uv pip compile --quiet --universal --python-version 3.11 \
    --all-extras --group dev packages/*/pyproject.toml \
    --no-emit-package hf-protocols --no-emit-package hf-engine --no-emit-package hf-mapper \
    --no-emit-package hf-controller --no-emit-package hf-algorithms \
    --no-annotate --no-header "$@" --output-file constraints.txt
