#!/usr/bin/env bash
# TPU=NAME ZONE=us-central2-b bash configs/launch/tpu_vm.sh --arch vit --bf16
# The same command on every host of a TPU VM or of a slice of a pod, each with a checkout in ~/cssm and the tpu extra
# installed in its .venv; the hosts find each other by the metadata of the machine. Not run: there was no TPU.
set -euo pipefail
: "${TPU:?type the name of the TPU VM: TPU=NAME ZONE=ZONE bash configs/launch/tpu_vm.sh}" "${ZONE:?type its zone}"

# What a host runs. An endpoint is a host, or name:id:host.
# shellcheck disable=SC2016 # these variables are the host's
on_each_host='
set -euo pipefail
metadata() {
    curl -sf -H "Metadata-Flavor: Google" "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
hosts=$(metadata worker-network-endpoints)
first=${hosts%%,*}
commas=${hosts//[^,]/}
cd "${CHECKOUT:-$HOME/cssm}"
exec .venv/bin/python main.py --num_processes $((${#commas} + 1)) --process_id "$(metadata agent-worker-number)" \
    --coordinator_address "${first##*:}" --coordinator_port 8476'
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$on_each_host $(printf '%q ' "$@")"
