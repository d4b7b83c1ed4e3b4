"""Reads usage and costs, by model and by tag, with OpenAI's SDK for administrators."""

import time

from openai import OpenAI

client = OpenAI()
usage = client.admin.organization.usage
since = int(time.time()) - 7 * 86_400  # in days of UTC that is parts of eight
for bucket in usage.completions(start_time=since, group_by=["model"], limit=8).data:
    for row in bucket.results:
        requests, tokens = row.num_model_requests, row.input_tokens + row.output_tokens
        print(f"{row.model}: {requests} requests, {tokens} tokens")
for bucket in usage.costs(start_time=since, limit=8, group_by=["tag:team"]).data:
    for row in bucket.results:
        print(f"{row.tag or 'no tag'}: {row.amount.value:.8f} {row.amount.currency}")
