#!/usr/bin/env bash
# Node classification on Cora: a public checkpoint, its own score, and readouts of its layers.
#
#   bash examples/cora.sh NodeLevelGNN.ckpt DATA OUT
#
# The checkpoint is tutorial7/NodeLevelGNN.ckpt of phlippe/saved_models. DATA is a folder that holds
# Cora (DATA/Cora/raw/ind.cora.x, ...) and is only read. OUT is a folder to write.
set -euo pipefail
here=$(dirname "$0")
checkpoint=${1:?usage: bash cora.sh CHECKPOINT DATA OUT}
data=${2:?usage: bash cora.sh CHECKPOINT DATA OUT}
out=${3:?usage: bash cora.sh CHECKPOINT DATA OUT}
epochs=${EPOCHS:-60}

# Prints 0.824 for the test part of the public split, as its authors report: it was loaded right.
histograph cache --model "$here/uvadlc_node_gcn.py:GNNModel" --checkpoint "$checkpoint" \
    --data planetoid:Cora --data-root "$data" -o "$out/cora.cache"

# Every node is a row: 140 train, 500 validate, 1,000 test.
histograph compare "$out/cora.cache" --heads mlp,concat,histograph \
    --epochs "$epochs" --patience 20 --seeds 0-2 -o "$out/compare"

# The readout that was best on the validation nodes, on the graph as it comes.
histograph predict "$out/compare" --model "$here/uvadlc_node_gcn.py:GNNModel" \
    --data planetoid:Cora --data-root "$data" -o "$out/predictions.csv" --overwrite
