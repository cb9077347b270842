#!/usr/bin/env bash
# Sets up .venv: the five packages, editable, and everything that the tests, checks and docs need.
#
#   scripts/env.sh                    does nothing when nothing changed since the last time
#   PYTHON=python3.12 scripts/env.sh  chooses the interpreter of a new .venv
#
# Needs Python 3.11 or newer, and nothing else: uv comes into .bootstrap where there is none. Versions come from
# constraints.txt. Torch's CPU build is taken where pip is configured with a directory that holds it, and the registry's
# build of the same version elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.hybridflow-env

fingerprint() { # all that the environment depends on; editable installs hold this folder's path
    pwd -P
    cksum scripts/env.sh scripts/registry.sh constraints.txt pyproject.toml packages/*/pyproject.toml
}

fail() {
    echo "scripts/env.sh: $*" >&2
    exit 1
}

find_python() {
    local candidate seen=""
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        seen="$seen, $candidate is $("$candidate" --version 2>/dev/null || echo missing)"
    done
    fail "HybridFlow needs Python 3.11 or newer, but ${seen#, }. Install one, or name it: PYTHON=python3.11 make test"
}

usable_uv() {
    "$1" pip install --help 2>/dev/null | grep -e '--group' >/dev/null
}

find_uv() {
    local candidate
    for candidate in uv .bootstrap/bin/uv; do
        if usable_uv "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    "$python" -m venv .bootstrap >&2 || fail "\`$python -m venv .bootstrap\` failed; its message is above"
    .bootstrap/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv >&2 ||
        fail "pip could not install uv; its message is above"
    echo .bootstrap/bin/uv
}

if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(fingerprint)" = "$(cat "$stamp")" ]; then
    exit 0
fi

echo "Setting up .venv (the first time takes a while: torch alone is several hundred MB)" >&2
python=$(find_python)
source scripts/registry.sh
uv=$(find_uv)

if ! .venv/bin/python -c '' 2>/dev/null; then
    "$uv" venv --quiet --clear --python "$python" .venv
fi
rm -f "$stamp"
"$uv" pip install --python .venv/bin/python --constraints constraints.txt --build-constraints constraints.txt \
    --compile-bytecode --group dev \
    -e packages/hf-protocols -e "packages/hf-engine[megatron]" -e packages/hf-mapper -e packages/hf-controller -e packages/hf-algorithms
fingerprint >"$stamp"
