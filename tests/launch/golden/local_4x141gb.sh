#!/usr/bin/env bash
# rlpipe launch: run arithmetic-seed1 on local_4x141gb (local), 1 node x 4 GPUs, of which the run uses 2
# Handed on from your environment where they are set: WANDB_API_KEY, HF_TOKEN
cd /project || exit
export RLPIPE_PROGRAMS=/programs
bash /project/scripts/local.sh configs/demo/arithmetic.yaml seed=1
