"""The endpoint: requests as OpenAI's API and llama-server take them -> the decoder, and back.

Needs starlette and uvicorn; never needs numba, click or yaml.
"""

from sequoia_plan.server.run import serve
from sequoia_plan.server.worker import Worker

__all__ = ["Worker", "serve"]
