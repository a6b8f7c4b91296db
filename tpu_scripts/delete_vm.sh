#!/usr/bin/env bash
# Deletes a TPU VM, and with it everything that is on its disk.
set -euo pipefail

usage() {
  cat <<'TEXT'
delete_vm.sh --name NAME --zone ZONE [--project PROJECT]

Deletes a TPU VM with its disk, after asking. Checkpoints in a bucket stay.

  --name NAME       name of the TPU VM
  --zone ZONE       its zone
  --project PROJECT its project (default: that of gcloud's configuration)
  --help            print this text
TEXT
}

fail() {
  echo "delete_vm.sh: $*" >&2
  exit 2
}

name="" zone=""
project=()
while (($#)); do
  case "$1" in
    --help) usage; exit 0 ;;
    --name | --zone | --project) (($# > 1)) || fail "$1 needs a value" ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
  case "$1" in
    --name) name="$2" ;;
    --zone) zone="$2" ;;
    --project) project=(--project "$2") ;;
  esac
  shift 2
done
[[ -n "$name" ]] || fail "give a --name"
[[ -n "$zone" ]] || fail "give a --zone"
command -v gcloud >/dev/null || fail "gcloud was not found; install the Google Cloud CLI"

gcloud compute tpus tpu-vm delete "$name" --zone "$zone" ${project[@]+"${project[@]}"}
