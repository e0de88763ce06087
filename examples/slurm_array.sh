#!/usr/bin/env bash
# Cache in shards with a Slurm job array: eight jobs write one cache, whichever ends last joins it.
#
#   MODEL=my_model.py:Net CHECKPOINT=model.ckpt DATA=ogbg:molhiv OUT=molhiv.cache \
#       sbatch examples/slurm_array.sh
#
# All of it goes into one folder on a disk that every node sees. A job that was killed or preempted
# goes on where it stopped: requeue it, or submit the whole array again. To train on the cache after:
#
#   sbatch --dependency=afterok:JOB --wrap "histograph train-head molhiv.cache -o runs/molhiv"
#
#SBATCH --job-name=histograph-cache
#SBATCH --array=0-7
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=02:00:00
#SBATCH --requeue
#SBATCH --output=%x-%A_%a.log
set -euo pipefail
: "${MODEL:?}" "${CHECKPOINT:?}" "${DATA:?}" "${OUT:?}" "${SLURM_ARRAY_TASK_ID:?}"
jobs=${SLURM_ARRAY_TASK_COUNT:?}

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# Whatever else `histograph cache` takes can be given in EXTRA, such as "--dtype float16".
# Shards have to be small enough to go round: `--dry-run` tells how many there would be.
# shellcheck disable=SC2086  # EXTRA is several words on purpose
histograph cache --model "$MODEL" --checkpoint "$CHECKPOINT" --data "$DATA" \
    --shard "$SLURM_ARRAY_TASK_ID/$jobs" -o "$OUT" ${EXTRA:-}
