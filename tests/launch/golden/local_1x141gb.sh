#!/usr/bin/env bash
# rlpipe launch: run arithmetic-seed1 on local_1x141gb (local), 1 node x 1 GPUs, of which the run uses 1
# Handed on from your environment where they are set: WANDB_API_KEY, HF_TOKEN
cd /project || exit
export RLPIPE_PROGRAMS=/programs
bash /project/scripts/local.sh configs/demo/arithmetic.yaml seed=1 ray.colocate=true
