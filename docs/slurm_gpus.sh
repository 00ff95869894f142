#!/bin/bash
# fly_jax on two nodes of 8 GPUs under Slurm: sbatch docs/slurm_gpus.sh
#
# One task for each GPU, as JAX expects it under Slurm: each task takes the GPU of its number on the
# node. See docs/pods.md.
#SBATCH --job-name=fly_jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00

models=${MODELS:?set MODELS to a folder that every node sees}

# Stops the tasks that are left when one ends in an error, even if that one could not say so.
srun --kill-on-bad-exit=1 python -m fly_jax.launch \
  --mesh 2x8 \
  --target "$models/Llama-3.1-405B-Instruct" \
  --draft "$models/Llama-3.1-8B-Instruct" \
  --rule fly --num_speculative_tokens 25 \
  --prompts_file "$models/prompts.jsonl" \
  --json
