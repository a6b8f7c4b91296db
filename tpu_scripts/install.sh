#!/usr/bin/env bash
# Installs this repository and TensorFlow for TPUs on a TPU VM.
set -euo pipefail

usage() {
  cat <<'TEXT'
install.sh --name NAME --zone ZONE [options]

Copies this repository to the TPU VM, makes the virtual environment ~/mesh-venv there, installs
TensorFlow for TPUs and the package into it, and prints the TPU cores that TensorFlow finds.

  --name NAME       name of the TPU VM
  --zone ZONE       its zone
  --project PROJECT its project (default: that of gcloud's configuration)
  --tensorflow V    version of TensorFlow for TPUs (default 2.18.0)
  --help            print this text
TEXT
}

fail() {
  echo "install.sh: $*" >&2
  exit 2
}

name="" zone="" tensorflow="2.18.0"
project=()
while (($#)); do
  case "$1" in
    --help) usage; exit 0 ;;
    --name | --zone | --project | --tensorflow) (($# > 1)) || fail "$1 needs a value" ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
  case "$1" in
    --name) name="$2" ;;
    --zone) zone="$2" ;;
    --project) project=(--project "$2") ;;
    --tensorflow) tensorflow="$2" ;;
  esac
  shift 2
done
[[ -n "$name" ]] || fail "give a --name"
[[ -n "$zone" ]] || fail "give a --zone"
[[ "$tensorflow" =~ ^[0-9.]+$ ]] || fail "--tensorflow needs a version such as 2.18.0"
command -v gcloud >/dev/null || fail "gcloud was not found; install the Google Cloud CLI"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(mktemp -d)"
archive="$folder/mesh_tensorflow.tar.gz"
trap 'rm -rf "$folder"' EXIT
tar -czf "$archive" -C "$root" --exclude=.git --exclude=.venv --exclude=__pycache__ .
gcloud compute tpus tpu-vm scp "$archive" "$name:mesh_tensorflow.tar.gz" --zone "$zone" \
  ${project[@]+"${project[@]}"}

# The package asks for tensorflow by name, and tensorflow-tpu has another one: hence --no-deps.
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" ${project[@]+"${project[@]}"} --command "
set -euo pipefail
mkdir -p ~/mesh_tensorflow
tar -xzf ~/mesh_tensorflow.tar.gz -C ~/mesh_tensorflow
python3 -m venv ~/mesh-venv 2>/dev/null || {
  sudo apt-get update -q
  sudo apt-get install -qy python3-venv
  python3 -m venv ~/mesh-venv
}
~/mesh-venv/bin/pip install -q --upgrade pip
~/mesh-venv/bin/pip install -q 'tensorflow-tpu==$tensorflow' \
  -f https://storage.googleapis.com/libtpu-tf-releases/index.html
~/mesh-venv/bin/pip install -q tensorflow-datasets gin-config tqdm
~/mesh-venv/bin/pip install -q --no-deps ~/mesh_tensorflow
~/mesh-venv/bin/python -c \"
from mesh_tensorflow import tpu_mesh
print('TPU of shape', tpu_mesh.connect('local').mesh_shape, '(chips x, y, z, cores of a chip)')
\"
"
echo "installed on $name; next: train.sh --name $name --zone $zone --model-dir gs://... FILE.gin"
