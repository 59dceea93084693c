#!/usr/bin/env bash
# rlpipe launch: run arithmetic-seed1 on slurm_2x8x141gb (slurm), 2 nodes x 8 GPUs, of which the run uses 2
# Handed on from your environment where they are set: WANDB_API_KEY, HF_TOKEN
cd /project || exit
export RLPIPE_PROGRAMS=/programs
export RLPIPE_SCRIPTS=/project/scripts
export RLPIPE_RAY_PORT=6379
export RLPIPE_NODE_CPUS=128
export RLPIPE_NODE_GPUS=8
export RLPIPE_MAX_REQUEUES=1000
export NCCL_SOCKET_IFNAME=eth0
export GLOO_SOCKET_IFNAME=eth0
export NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7
export HF_HUB_OFFLINE=1
sbatch --job-name=arithmetic-seed1 --nodes=2 --cpus-per-task=128 --mem=1900000M --time=24:00:00 --signal=B:USR1@180 --gpus-per-node=8 --partition=gpu --chdir=/project --export=HOME,PATH,USER,LANG,RLPIPE_PROGRAMS,RLPIPE_SCRIPTS,RLPIPE_RAY_PORT,RLPIPE_NODE_CPUS,RLPIPE_NODE_GPUS,RLPIPE_MAX_REQUEUES,NCCL_SOCKET_IFNAME,GLOO_SOCKET_IFNAME,NCCL_IB_HCA,HF_HUB_OFFLINE,WANDB_API_KEY,HF_TOKEN --exclusive /project/scripts/slurm.sbatch configs/demo/arithmetic.yaml seed=1
