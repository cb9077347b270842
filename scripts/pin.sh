#!/usr/bin/env bash
# Writes constraints.txt: the newest versions that all five packages and the development tools can share, for every
# platform; and constraints-<engine>.txt: the same next to the CPU build of a generation engine, on Linux, as near to
# constraints.txt as the engine's own pins allow. Pass uv's options to move on purpose, such as `--upgrade` or
# `--upgrade-package rich`.
#
# find-links is cleared, or a local build such as torch 2.13.0+cpu would be pinned, which other machines cannot install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ENGINE_DEVICE=cpu source scripts/engines.sh

compile() { # $1: the file to write, then uv's options
    env -u UV_FIND_LINKS .venv/bin/uv pip compile --quiet --python-version 3.11 \
        --extra transformers --extra megatron --extra datasets --extra lora --group dev packages/*/pyproject.toml \
        --no-emit-package hf-protocols --no-emit-package hf-engine --no-emit-package hf-mapper \
        --no-emit-package hf-controller --no-emit-package hf-algorithms \
        --no-annotate --no-header "${@:2}" --output-file "$1"
}

compile constraints.txt --universal --extra serve --extra verify "$@"
for engine in $engines; do
    _engine_settings "$engine"
    # what the file says already is what uv prefers
    sed 's/ *;.*//' constraints.txt | sort -u -t= -k1,1 >"constraints-$engine.txt"
    compile "constraints-$engine.txt" --python-platform "$engine_platform" --extra "$engine_extra" \
        --overrides <(echo "$engine_overrides" | tr ' ' '\n') --excludes <(echo "$engine_excludes" | tr ' ' '\n')
done
