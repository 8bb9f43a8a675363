#!/bin/sh
# Two agents in shell: one asks through the queue, the other writes to the bus and answers.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export POSTROOM_BUS="$folder/messagebus.yaml"
export POSTROOM_QUEUE_ROOT="$folder/queue"

builder() {
    postroom queue poll --agent builder --wait 10 | while read -r message; do
        id=$(echo "$message" | python3 -c 'import json, sys; print(json.load(sys.stdin)["msg_id"])')
        postroom bus post --type build --project demo --body "built for $id" >/dev/null
        postroom queue send --topic answer --to boss --sender builder --reply-to "$id" --body "green" >/dev/null
    done
}

builder &
postroom queue ask --to builder --sender boss --timeout-s 20 --body "How is the build?" |
    python3 -c 'import json, sys; print("the answer is", json.load(sys.stdin)["body"])'
wait

echo "messages on the bus: $(postroom bus count)"
postroom bus verify >/dev/null && echo "nothing is damaged"
