"""Has ten questions answered as one batch, at the batch's price, and reads the results."""

import json
import os
import time

from openai import OpenAI

client = OpenAI()
lines = [
    {
        "custom_id": f"sum-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": os.environ["MODEL"],
            "messages": [{"role": "user", "content": f"What is {number} plus {number}?"}],
            "max_tokens": 32,
        },
    }
    for number in range(1, 11)
]
content = "\n".join(map(json.dumps, lines)).encode()
file = client.files.create(file=("questions.jsonl", content), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts)
for line in client.files.content(batch.output_file_id).text.splitlines():
    result = json.loads(line)
    answer = result["response"]["body"]["choices"][0]["message"]["content"]
    print(result["custom_id"], answer)
