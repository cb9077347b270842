#!/usr/bin/env bash
# Sets up .venv: the five packages, editable, and everything that the tests, checks and docs need.
#
#   scripts/env.sh                    does nothing when nothing changed since the last time
#   scripts/env.sh vllm               the same in .venv-vllm, with a generation engine whose pins need a place of their own
#   scripts/env.sh sglang             the same in .venv-sglang
#   scripts/env.sh trackers           the same in .venv-trackers, with the experiment trackers
#   PYTHON=python3.12 scripts/env.sh  chooses the interpreter of a new environment
#
# Needs Python 3.11 or newer, and nothing else: uv comes into .bootstrap where there is none. Versions come from
# constraints.txt, with an engine's CPU build from constraints-<engine>.txt. Torch's CPU build is taken where pip is
# configured with a directory that holds it, and the registry's build of the same version elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/engines.sh
engine=${1:-}
venv=.venv${engine:+-$engine}
stamp=$venv/.hybridflow-env

fingerprint() { # all that the environment depends on; editable installs hold this folder's path
    pwd -P
    echo "$engine_device"
    cksum scripts/env.sh scripts/engines.sh scripts/registry.sh constraints*.txt pyproject.toml packages/*/pyproject.toml
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

# What pip installs next to the base environment, as uv's arguments.
engine_arguments() {
    if [ -z "$engine" ]; then
        return
    fi
    printf '%s\n' ${engine_flags:+"$engine_flags"} -e "packages/$engine_package[$engine_extra]"
    if [ -n "$engine_overrides" ]; then
        echo "$engine_overrides" | tr ' ' '\n' >"$venv/overrides.txt"
        printf '%s\n' --overrides "$venv/overrides.txt"
    fi
    if [ -n "$engine_excludes" ]; then
        echo "$engine_excludes" | tr ' ' '\n' >"$venv/excludes.txt"
        printf '%s\n' --excludes "$venv/excludes.txt"
    fi
}

pins=constraints.txt
if [ -n "$engine" ]; then
    case " $engines " in
    *" $engine "*) _engine_settings "$engine" ;;
    *) fail "no engine named $engine; there is an environment for: $engines" ;;
    esac
    # The CUDA build brings pins of its own; those of the workspace's pyproject.toml hold for both.
    pins=$([ "$engine_device" = cpu ] && echo "constraints-$engine.txt" || echo "")
fi

if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(fingerprint)" = "$(cat "$stamp")" ]; then
    exit 0
fi

echo "Setting up $venv (the first time takes a while: torch alone is several hundred MB)" >&2
python=$(find_python)
source scripts/registry.sh
uv=$(find_uv)

if ! "$venv/bin/python" -c '' 2>/dev/null; then
    "$uv" venv --quiet --clear --python "$python" "$venv"
fi
rm -f "$stamp"
mapfile -t arguments < <(engine_arguments)
"$uv" pip install --python "$venv/bin/python" ${pins:+--constraints "$pins"} --build-constraints constraints.txt \
    $([ -z "$engine" ] && echo --compile-bytecode) --group dev "${arguments[@]}" \
    -e packages/hf-protocols -e "packages/hf-engine[megatron]" -e packages/hf-mapper -e packages/hf-controller \
    -e "packages/hf-algorithms$([ -z "$engine" ] && echo '[datasets,lora,serve,verify]' || echo '[datasets,lora]')"
fingerprint >"$stamp"
