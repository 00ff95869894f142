#!/bin/bash
# All of curve.py on one GPU of 80 GB or more, from the repository's root, in about ten minutes:
#   bash recipes/heads/curve.sh MODEL.gguf prompts.jsonl question.jsonl runs/curve
set -e
part() { PYTHONPATH=. python3 recipes/heads/curve.py --part "$@"; }
given=(--teacher "$1" --prompts_file "$2" --held_out "$3" --directory "$4")
part answers "${given[@]}"
export XLA_CLIENT_MEM_FRACTION=.3
part eagle3 --answer_tokens 2000000,500000,1000000,0 --passes 3 "${given[@]}" &
part dspark --answer_tokens 2000000,500000,1000000 "${given[@]}" &
part pard --answer_tokens 2000000,500000,1000000 "${given[@]}" &
for job in $(jobs -p); do wait "$job"; done
