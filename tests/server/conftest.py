"""A server of the embedded pair on a real socket, and openai's client of it."""

import threading
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from sequoia_plan.artifacts import load_tree
from sequoia_plan.runtime import Sampling
from sequoia_plan.server import Worker, serve

KEY = "the key"


@contextmanager
def serving(load, **options):
    """The URL of a server that runs in a thread of its own."""
    urls, workers = SimpleQueue(), []

    def load_once():
        workers.append(load())
        return workers[0]

    options = {"port": 0, "key": KEY, "on_ready": urls.put} | options
    thread = threading.Thread(target=serve, args=(load_once,), kwargs=options, daemon=True)
    thread.start()
    yield urls.get(timeout=120)
    workers[0].jobs.put(None)
    thread.join()


@pytest.fixture(scope="module")
def worker(pair):
    return Worker(pair, load_tree("smollm2-135m-epyc-2-cores-t0"), Sampling(), 8192)


@pytest.fixture(scope="module")
def url(worker):
    with serving(lambda: worker, cors="http://page.example") as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
