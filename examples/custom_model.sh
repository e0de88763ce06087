#!/usr/bin/env bash
# A checkpoint with a model file of your own: from the training script to a better readout.
#
#   bash examples/custom_model.sh OUT
#
# OUT is a folder to write; it needs no data. The model and the data are those of custom_model.py.
set -euo pipefail
here=$(dirname "$0")
out=${1:?usage: bash custom_model.sh OUT}
epochs=${EPOCHS:-40}

# The checkpoint and its split, as the training script saves them.
python "$here/custom_model.py" "$out"

# What is in the file, and what would be captured with this model: nothing is written.
histograph inspect "$out/model.pt"
histograph inspect "$out/model.pt" \
    --model "$here/custom_model.py:Net" --data "$here/custom_model.py:graphs"

# Run the model once. `num_graphs` goes to the function, as --model-args would go to the class.
histograph cache --model "$here/custom_model.py:Net" --checkpoint "$out/model.pt" \
    --data "$here/custom_model.py:graphs" --data-args num_graphs=400 \
    --split "$out/split" -o "$out/net.cache"

# A readout over all blocks, beside the last block's mean pool, trained and tested on the same graphs
# as the model was.
histograph train-head "$out/net.cache" --dim 32 --epochs "$epochs" --seeds 0-2 -o "$out/head"

# New graphs: the same function with another seed. The model is named again: what a run records as
# its model is never run by itself.
histograph predict "$out/head" --model "$here/custom_model.py:Net" \
    --data "$here/custom_model.py:graphs" --data-args num_graphs=50 --data-args seed=1 -o "$out/predictions.csv" \
    --overwrite
