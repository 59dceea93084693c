#!/usr/bin/env bash
# rlpipe launch: run arithmetic-seed1 on local_8x80gb (local), 1 node x 8 GPUs, of which the run uses 2
# Handed on from your environment where they are set: WANDB_API_KEY, HF_TOKEN
cd /project || exit
export RLPIPE_PROGRAMS=/programs
bash /project/scripts/local.sh configs/demo/arithmetic.yaml ray.object_store_bytes=20000000000 ray.cpus=96 seed=1
