#!/usr/bin/env bash
# Molecules with a pretrained GCN: from a public checkpoint to a table of readouts.
#
#   bash examples/molecules.sh chem_gcn_contextpred.pth BBBP.csv OUT
#
# The checkpoint is one of snap-stanford/pretrain-gnns, the molecules are MoleculeNet's BBBP: a column
# of SMILES and one of targets. OUT is a folder to write.
# Needs pip install 'histograph-post[chem,report]'.
set -euo pipefail
checkpoint=${1:?usage: bash molecules.sh CHECKPOINT MOLECULES.csv OUT}
molecules=${2:?usage: bash molecules.sh CHECKPOINT MOLECULES.csv OUT}
out=${3:?usage: bash molecules.sh CHECKPOINT MOLECULES.csv OUT}
epochs=${EPOCHS:-30}

# The name of the model also decides how molecules are encoded; `histograph recipes` lists others.
# Unreadable molecules are left out and listed. The scaffold split tests on unlike molecules.
# The model has no classifier, so there is no score of its own: it is the heads that predict.
histograph cache --model pretrain-gnns:gcn --checkpoint "$checkpoint" \
    --data "smiles:$molecules" --split scaffold -o "$out/molecules.cache"

# Three readouts of the same frozen layers, three seeds each.
histograph compare "$out/molecules.cache" --heads mean,concat,histograph \
    --metric roc_auc --epochs "$epochs" --patience 10 --seeds 0-2 -o "$out/compare"

# The page shows which layers are used, and molecules coloured by attention.
histograph report "$out/compare" -o "$out/report.html" --overwrite
