#!/usr/bin/env bash
# A Lightning checkpoint: no Lightning needed, and nothing in the file is run.
#
#   bash examples/lightning_checkpoint.sh GraphLevelGraphConv.ckpt DATA OUT
#
# The checkpoint is tutorial7/GraphLevelGraphConv.ckpt of phlippe/saved_models. DATA is a folder that
# holds MUTAG (DATA/MUTAG/raw/MUTAG_A.txt, ...) and is only read. OUT is a folder to write.
set -euo pipefail
here=$(dirname "$0")
checkpoint=${1:?usage: bash lightning_checkpoint.sh CHECKPOINT DATA OUT}
data=${2:?usage: bash lightning_checkpoint.sh CHECKPOINT DATA OUT}
out=${3:?usage: bash lightning_checkpoint.sh CHECKPOINT DATA OUT}
epochs=${EPOCHS:-50}

# The weights lie under `state_dict`, and every name starts with `model.`: the attribute of the
# LightningModule that holds the network. Both are found, and the prefix is taken off.
histograph inspect "$checkpoint"

# So --model names the network, not the LightningModule around it.
histograph inspect "$checkpoint" --model "$here/uvadlc_graph_conv.py:GraphGNNModel" \
    --data tu:MUTAG --data-root "$data"

# Prints 0.9255 for all 188 graphs, as it should. (The checkpoint was trained on most of them, so its
# own score on a part of the split is not one of unseen graphs, and the heads' scores are not, either.)
histograph cache --model "$here/uvadlc_graph_conv.py:GraphGNNModel" --checkpoint "$checkpoint" \
    --data tu:MUTAG --data-root "$data" --split kfold:10 -o "$out/mutag.cache"

histograph train-head "$out/mutag.cache" --dim 32 --epochs "$epochs" -o "$out/head"
