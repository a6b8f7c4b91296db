#!/usr/bin/env bash
# Creates a TPU VM. It costs money until delete_vm.sh deletes it.
set -euo pipefail

usage() {
  cat <<'TEXT'
create_vm.sh --name NAME --zone ZONE [options]

Creates a TPU VM, and waits until it answers.

  --name NAME       name of the TPU VM
  --zone ZONE       zone, such as us-central1-b
  --type TYPE       accelerator type (default v3-8)
  --version VERSION software version (default tpu-ubuntu2204-base; v5e: v2-alpha-tpuv5-lite)
  --project PROJECT project (default: that of gcloud's configuration)
  --spot            a spot TPU: cheaper, and may be taken away at any time
  --help            print this text
TEXT
}

fail() {
  echo "create_vm.sh: $*" >&2
  exit 2
}

name="" zone="" type="v3-8" version="tpu-ubuntu2204-base"
project=() spot=()
while (($#)); do
  case "$1" in
    --help) usage; exit 0 ;;
    --spot) spot=(--spot); shift; continue ;;
    --name | --zone | --type | --version | --project) (($# > 1)) || fail "$1 needs a value" ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
  case "$1" in
    --name) name="$2" ;;
    --zone) zone="$2" ;;
    --type) type="$2" ;;
    --version) version="$2" ;;
    --project) project=(--project "$2") ;;
  esac
  shift 2
done
[[ -n "$name" ]] || fail "give a --name"
[[ -n "$zone" ]] || fail "give a --zone"
command -v gcloud >/dev/null || fail "gcloud was not found; install the Google Cloud CLI"

gcloud compute tpus tpu-vm create "$name" --zone "$zone" --accelerator-type "$type" \
  --version "$version" ${project[@]+"${project[@]}"} ${spot[@]+"${spot[@]}"}
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" ${project[@]+"${project[@]}"} \
  --command "python3 --version"
echo "created $name ($type) in $zone; next: install.sh --name $name --zone $zone"
