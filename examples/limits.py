"""Makes a key with a limit, meets it, waits as long as the answer says, and takes the key back."""

import os
import time

import httpx
from openai import OpenAI, RateLimitError

admin = httpx.Client(
    base_url=os.environ["OPENAI_BASE_URL"] + "/admin/",
    headers={"Authorization": f"Bearer {os.environ['OPENAI_ADMIN_KEY']}"},
)
projects = admin.get("projects").raise_for_status().json()["data"]
key = {"name": "example", "project_id": projects[0]["id"], "requests_per_minute": 60}
made = admin.post("keys", json=key).raise_for_status().json()

client = OpenAI(api_key=made["value"], max_retries=0)  # by default the SDK waits and tries again
asked = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "Hello"}]}
answered = 0
while True:
    try:
        client.chat.completions.create(**asked, max_tokens=1)
        answered += 1
    except RateLimitError as error:
        wait_s = int(error.response.headers["retry-after-ms"]) / 1000
        print(f"{answered} answers, then: {error.body['message']}")
        break
time.sleep(wait_s)
client.chat.completions.create(**asked, max_tokens=1)
print(f"answered again after {wait_s} s")

admin.post(f"keys/{made['id']}/revoke").raise_for_status()
print("revoked")
