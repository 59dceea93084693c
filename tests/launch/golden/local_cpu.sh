#!/usr/bin/env bash
# rlpipe launch: run arithmetic-seed1 on local_cpu (local), 1 node without GPUs
# Handed on from your environment where they are set: WANDB_API_KEY, HF_TOKEN
cd /project || exit
bash scripts/local.sh configs/demo/arithmetic.yaml seed=1
