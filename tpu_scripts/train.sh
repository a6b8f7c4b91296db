#!/usr/bin/env bash
# Trains on a TPU VM, as gin files say.
set -euo pipefail

usage() {
  cat <<'TEXT'
train.sh --name NAME --zone ZONE --model-dir DIR [options] FILE.gin...

Runs the trainer on the TPU VM in the background, in a tmux session "mesh", and shows its log;
Ctrl-C leaves the log, not the training. Called again while it runs, it only shows the log. The
trainer goes on from the newest checkpoint of DIR.

  --name NAME       name of the TPU VM
  --zone ZONE       its zone
  --project PROJECT its project (default: that of gcloud's configuration)
  --model-dir DIR   folder for checkpoints: gs://BUCKET/FOLDER, or a folder of the VM
  --gin_param TEXT  a gin binding, such as "run.train_steps = 1000" (may be repeated)
  --cores N         cores of a chip (default 2; v4 and later: 1)
  --help            print this text

FILE.gin: gin files of the package (problems/lm1b.gin, layouts/...), in order.
TEXT
}

fail() {
  echo "train.sh: $*" >&2
  exit 2
}

name="" zone="" model_dir="" cores="2"
project=() arguments=() files=()
while (($#)); do
  case "$1" in
    --help) usage; exit 0 ;;
    --name | --zone | --project | --model-dir | --gin_param | --cores)
      (($# > 1)) || fail "$1 needs a value" ;;
    -*) fail "unknown argument $1; see --help" ;;
    *) files+=("$1"); shift; continue ;;
  esac
  case "$1" in
    --name) name="$2" ;;
    --zone) zone="$2" ;;
    --project) project=(--project "$2") ;;
    --model-dir) model_dir="$2" ;;
    --gin_param) arguments+=("--gin_param=$2") ;;
    --cores) cores="$2" ;;
  esac
  shift 2
done
[[ -n "$name" ]] || fail "give a --name"
[[ -n "$zone" ]] || fail "give a --zone"
[[ -n "$model_dir" ]] || fail "give a --model-dir"
((${#files[@]})) || fail "give at least one gin file"
[[ "$cores" =~ ^[12]$ ]] || fail "--cores is 1 or 2"
command -v gcloud >/dev/null || fail "gcloud was not found; install the Google Cloud CLI"

command=("mesh-venv/bin/python" -m mesh_tensorflow.transformer.main --tpu=local
  "--logical_cores_per_chip=$cores" "--model_dir=$model_dir")
for file in "${files[@]}"; do
  command+=("--gin_file=$file")
done
command+=(${arguments[@]+"${arguments[@]}"})
# Quoted twice: for the shell of the VM, and for the one that tmux starts.
line="$(printf '%q ' "${command[@]}")"
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" ${project[@]+"${project[@]}"} --command "
set -euo pipefail
if ! tmux has-session -t mesh 2>/dev/null; then
  tmux new-session -d -s mesh $(printf '%q' "$line 2>&1 | tee -a mesh.log")
fi
touch mesh.log
tail -n 50 -F mesh.log
"
