"""Ask a running `sequoia-plan serve` with openai's client, and stream the answer.

In another terminal: sequoia-plan serve. The argument is its URL.
"""

import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=32,
    temperature=0,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
