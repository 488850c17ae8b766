"""Tool calls in a text, in Qwen's format: JSON between <tool_call> and </tool_call>."""

import json
import re
from typing import Any
from uuid import uuid4

OPENED = "<tool_call>"
CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def calls_in(text: str) -> list[dict[str, Any]] | None:
    """The calls as OpenAI's API has them; None if there is none, or one is no call."""
    calls = []
    for source in CALL.findall(text):
        try:
            call = json.loads(source)
            function = {
                "name": str(call["name"]),
                "arguments": json.dumps(call["arguments"], ensure_ascii=False),
            }
        except (ValueError, TypeError, KeyError):
            return None
        calls.append({"type": "function", "id": f"call_{uuid4().hex}", "function": function})
    return calls or None
