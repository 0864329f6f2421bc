#!/usr/bin/env bash
# Ingest a folder, ask in JSON, take the answer apart with jq.
#   examples/shell.sh [FOLDER] [QUESTION]
set -euo pipefail
folder=${1:-$(dirname "$0")/docs}
question=${2:-"Who founded the company?"}

cacheblend ingest --quiet "$folder"

# The whole result is one JSON document on stdout; everything else goes to stderr.
result=$(cacheblend ask --json --top-k 4 --max-tokens 60 "$question")

jq --raw-output '.answer' <<<"$result"
jq --raw-output '"first token after \(.timing.ttft_s * 1000 | round) ms, "
  + "\(.recomputed.tokens) of the cached tokens recomputed"' <<<"$result"
jq --raw-output '.prompt.segments[] | select(.kind == "chunk")
  | "  \(.chunk_id[:12])  \(.status)  \(.source)"' <<<"$result"

# Any order of the same chunks is as fast; here the reverse of what retrieval chose.
mapfile -t chunks < <(jq --raw-output '[.prompt.segments[].chunk_id // empty] | reverse[]' <<<"$result")
cacheblend ask "${chunks[@]/#/--chunk=}" --max-tokens 60 "$question"
