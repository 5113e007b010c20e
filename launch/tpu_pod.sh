#!/usr/bin/env bash
# A run on every worker of a Cloud TPU: launch/tpu_pod.sh NAME ZONE --config=configs/X.py --workdir=/shared/runs/x [FLAGS]
# It outlives this connection, and starts again when a worker was lost; its output is in ~/orthojax/train.log.
set -euo pipefail
name=$1 zone=$2
shift 2
flags=$(printf ' %q' --multihost --compile_cache=runs/xla "$@")  # the config says how: mesh.fsdp=-1 or mesh.data=-1
# 75: another was lost. 134: another did not join. 137, 139: this one was killed, or crashed.
loop="until orthojax train$flags; do case \$? in 75|134|137|139) sleep 20;; *) break;; esac; done"
# A command dies with its ssh connection; nohup and setsid take it out of the session.
gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all \
  --command="cd orthojax && nohup setsid bash -c $(printf %q "$loop") > train.log 2>&1 < /dev/null &"
