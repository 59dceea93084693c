#!/usr/bin/env bash
# rlpipe launch: run arithmetic-seed1 on ray_2x8x141gb (ray), 2 nodes x 8 GPUs, of which the run uses 2
# Handed on from your environment where they are set: WANDB_API_KEY, HF_TOKEN
cd /project || exit
export RLPIPE_PROGRAMS=/programs
bash /project/scripts/ray_cluster.sh auto configs/demo/arithmetic.yaml seed=1 ray.nodes=2 'ray.environment={"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}'
