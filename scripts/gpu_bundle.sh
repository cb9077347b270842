#!/usr/bin/env bash
# Packs `make bench-gpu` for a machine without network: benchmarks, the packages' wheels, and small libraries.
#
#   scripts/gpu_bundle.sh                          into dist/gpu_bundle, and dist/gpu_bundle.tar.gz
#   PYTHON_VERSION=3.11 scripts/gpu_bundle.sh DIR  for another Python than 3.12; DIR is of this repository, or absolute
#
# On that machine: tar -xf gpu_bundle.tar.gz && bash gpu_bundle/run.sh [arguments of bench_gpu.py]
# There torch is the machine's own, as are the libraries that it has; of the bundle's it takes what is missing. What
# neither has is named, and parts that need it are left out. The result is gpu_bundle/benchmarks/results/gpu.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${PYTHON_VERSION:-3.12}
bundle=${1:-dist/gpu_bundle}
most_mib=60
python=$PWD/.venv/bin/python
if [ -e "$bundle" ] && [ ! -d "$bundle/wheels" ] && ! rmdir "$bundle" 2>/dev/null; then
    echo "scripts/gpu_bundle.sh: $bundle is there, and is not a bundle. Choose another folder" >&2
    exit 1
fi
[ -x "$python" ] || { echo "scripts/gpu_bundle.sh: there is no .venv: run \`make env\` first" >&2; exit 1; }
rm -rf "$bundle" "$bundle.tar.gz"
mkdir -p "$bundle/wheels" "$bundle/benchmarks"
bundle=$(cd "$bundle" && pwd)

source scripts/registry.sh
for package in packages/*; do
    "$python" -m uv build --quiet --wheel --out-dir "$bundle/wheels" "$package"
done
rm -f "$bundle/wheels/.gitignore"
# All that hf-algorithms needs but what the machine has with its torch, Ray, and pyarrow, as large as all others.
needed=$("$python" - <<'NEEDED'
from importlib.metadata import requires, version
from packaging.requirements import Requirement

left_out = {"torch", "numpy", "pyarrow", "ray"}
found, todo = {}, ["hf-algorithms"]
while todo:
    name = todo.pop()
    for each in map(Requirement, requires(name) or ()):
        extra = "transformers" if name == "hf-engine" else ""
        wanted = each.name.lower().replace("_", "-")
        if wanted in left_out or wanted in found or (each.marker and not each.marker.evaluate({"extra": extra})):
            continue
        found[wanted] = version(wanted)
        todo.append(wanted)
print(*(f"{name}=={found[name]}" for name in sorted(found) if not name.startswith("hf-") or name == "hf-xet"))
NEEDED
)
pip=$(command -v pip3 || command -v pip)
# shellcheck disable=SC2086
"$pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version "$version" --abi "cp${version//./}" --abi abi3 --abi none --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any --dest "$bundle/wheels" $needed
cp benchmarks/{bench_gpu,gpu_transition,plain_loop,measurement,end_to_end_workloads}.py "$bundle/benchmarks"

cat >"$bundle/run.sh" <<'RUN'
#!/usr/bin/env bash
# Installs what is missing into a folder of this bundle, names what is still missing, and measures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/packages" HF_HUB_OFFLINE=1
rm -rf packages && mkdir packages
"$python" - <<'INSTALL'
import importlib, importlib.metadata, pathlib, re, sys, zipfile

def canonical(name):
    return re.sub("[-_.]+", "-", name).lower()

there = {canonical(each.metadata["Name"]) for each in importlib.metadata.distributions()}
def is_wanted(wheel):
    name = canonical(wheel.name.split("-")[0])
    return name not in there or name.startswith("hf-") and name != "hf-xet"

for wheel in filter(is_wanted, pathlib.Path("wheels").glob("*.whl")):
    zipfile.ZipFile(wheel).extractall("packages")  # no pip is needed for that
importlib.invalidate_caches()
found = {canonical(each.metadata["Name"]): each for each in importlib.metadata.distributions()}
lacking = {}
for name in ("hf-protocols", "hf-engine", "hf-controller", "hf-mapper", "hf-algorithms"):
    for requirement in found[name].requires or ():
        wanted = canonical(re.match(r"[\w.-]+", requirement)[0])
        if "extra ==" not in requirement and wanted not in found:
            lacking.setdefault(wanted, name)
print("python", sys.version.split()[0], "torch", found["torch"].version if "torch" in found else "absent")
print("lacks:", ", ".join(f"{name} (of {by})" for name, by in lacking.items()) or "nothing")
INSTALL
exec "$python" benchmarks/bench_gpu.py "$@"
RUN

tar -czf "$bundle.tar.gz" -C "$(dirname "$bundle")" "$(basename "$bundle")"
kib=$(du -sk "$bundle" | cut -f 1)
echo "$bundle: $((kib / 1024)) MiB, for Python $version"
if [ "$kib" -gt $((most_mib * 1024)) ]; then
    echo "scripts/gpu_bundle.sh: more than $most_mib MiB: leave out what is large" >&2
    exit 1
fi
