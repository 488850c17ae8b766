"""Texts through the endpoint, with openai's own client."""

import json
import runpy
from collections import defaultdict
from urllib.request import Request, urlopen

import pytest
from commands import succeed
from paths import ROOT

from sequoia_plan.engines.counters import parse
from sequoia_plan.engines.live import plan_of_counters
from sequoia_plan.server import prompts

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "Name three colours."}]
KEY = {"Authorization": "Bearer the key"}
SETTINGS = dict(model="any", messages=HELLO, max_tokens=24, temperature=0)
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call>'


LLAMA_VIM = """{
    "id_slot": 0, "input_prefix": "def add(a, b):\\n", "input_suffix": "\\nprint(add(1, 2))\\n",
    "input_extra": [{"filename": "a.py", "text": "x = 1\\n"}], "prompt": "    ret", "n_predict": 8,
    "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"],
    "stream": false, "cache_prompt": true, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "prompt", "timings/prompt_n", "no/such"]
}"""


@pytest.fixture(scope="module")
def chat(client):
    """A function: a chat completion, with other settings than `SETTINGS`."""
    return lambda **other: client.chat.completions.create(**SETTINGS | other)


@pytest.fixture(scope="module")
def ask(url):
    """A function: the answer to a request as text; without fields, to a GET."""
    return lambda path, data=None: urlopen(Request(url + path, data, KEY), timeout=120).read()


@pytest.fixture(scope="module")
def post(ask):
    """A function: the answer to a POST."""
    return lambda path, **body: json.loads(ask(path, json.dumps(body).encode()))


@pytest.fixture(scope="module")
def greedy(chat):
    return chat().choices[0].message.content


def test_greedy_text_is_generates(greedy):
    words = "--json", "--dtype", "float32", "--max-new-tokens", SETTINGS["max_tokens"]
    output = succeed("generate", *words, "--prompt", HELLO[0]["content"]).stdout
    assert greedy and greedy == json.loads(output)["text"]
    stop = greedy[8:11]
    output = succeed("generate", *words, "--prompt", HELLO[0]["content"], "--stop", stop).stdout
    assert json.loads(output)["text"] == greedy.partition(stop)[0]


SETTINGS_OF_STREAMS = """
{}
{"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
{"stop": ["no such text", "ed"]}
{"presence_penalty": 1.5, "frequency_penalty": 0.5, "repeat_penalty": 1.1}
{"logit_bias": {"28": -100}}
{"n": 2, "temperature": 0.5, "seed": 1}
"""


@pytest.mark.parametrize("line", SETTINGS_OF_STREAMS.strip().splitlines())
def test_a_stream_has_the_text_of_the_whole(chat, line):
    whole, texts = chat(extra_body=json.loads(line)), defaultdict(str)
    options = {"stream_options": {"include_usage": True}, "stream": True}
    *chunks, last = chat(extra_body=json.loads(line) | options, stream=True)
    assert not last.choices and last.usage == whole.usage
    parts = [choice for chunk in chunks for choice in chunk.choices]
    for part in parts:
        assert (part.delta.role is None) is (part.index in texts)
        texts[part.index] += part.delta.content
    assert [*texts.values()] == [choice.message.content for choice in whole.choices]
    ends = [part.finish_reason for part in parts if part.finish_reason]
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_seeds_repeat(chat):
    first, again, other = (
        chat(temperature=1, seed=n).choices[0].message.content for n in (1, 1, 2)
    )
    assert first == again != other


def test_stop_strings_are_cut_off(chat, greedy):
    stop, twin = greedy[9:13], greedy[9:12] + "~"
    for stops, text in (([stop], greedy.partition(stop)[0]), ([twin], greedy)):
        choice = chat(stop=stops).choices[0]
        assert choice.message.content == text
        assert choice.finish_reason == ("stop" if stop in stops else "length")


def test_structure_penalties_and_biases_are_followed(chat, greedy):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert "a" in json.loads(chat(response_format=form).choices[0].message.content)
    assert chat(presence_penalty=2).choices[0].message.content != greedy
    content = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(entry.token for entry in content).startswith(greedy)
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in content)
    token = str(content[0].model_extra["id"])
    assert not chat(logit_bias={token: -100}).choices[0].message.content.startswith(greedy[:4])


def test_tool_calls_are_parsed(chat):
    settings = dict(tools=[TOOL], max_tokens=60)
    grammar = {"grammar": f"root ::= {json.dumps(CALL)}"}
    choice = chat(**settings, extra_body=grammar).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("find", '{"a": 1}')
    stream = list(chat(**settings, extra_body=grammar, stream=True))
    assert stream[-1].choices[0].delta.tool_calls[0].function.name == "find"
    assert not "".join(chunk.choices[0].delta.content for chunk in stream)
    ignored = chat(**settings, extra_body=grammar, tool_choice="none").choices[0]
    assert ignored.message.content == CALL  # the control
    history = [*HELLO, {"role": "assistant", "tool_calls": [call.model_dump()]}]
    assert chat(messages=[*history, {"role": "tool", "content": "1"}]).choices[0].message.content


def test_what_an_editor_sends_to_infill(post, monkeypatch):
    """As llama.vim does; the embedded model has no such markers, so others take their place."""
    markers = "<issue_start>", "<issue_comment>", "<issue_closed>"
    names = "<repo_name>myproject\n", "<file_sep>", "<file_sep>filename\n"
    monkeypatch.setattr(prompts, "MARKERS", ((*names, *markers),))
    request = json.loads(LLAMA_VIM)
    first, second = post("/infill", **request), post("/infill", **request | {"n_predict": 0})
    assert first["prompt"] == (
        "<repo_name>myproject\n<file_sep>a.py\nx = 1\n<file_sep>filename\n<issue_start>"
        "def add(a, b):\n    ret<issue_comment>\nprint(add(1, 2))\n<issue_closed>"
    )
    assert set(first) == set(request["response_fields"][:-1]) and first["content"]
    assert second["timings/prompt_n"] == 1 < first["timings/prompt_n"] and not second["content"]


def test_a_text_ends_where_lines_are_indented_less_or_take_long(post):
    settings = {"prompt": "def add(a, b):\n   ", "n_predict": 48, "temperature": 0}
    whole = post("/completion", **settings)["content"]
    lines = whole.splitlines(keepends=True)
    count = next(i for i, line in enumerate(lines) if i and line.strip() and line[0] != " ")
    deep = post("/completion", **settings, n_indent=1)
    assert deep["content"] == "".join(lines[:count]) and deep["tokens_predicted"] < 48
    late = post("/completion", **settings, t_max_predict_ms=1e-3)
    assert (
        lines[0] in late["content"]
        and whole.startswith(late["content"])
        and late["content"] != whole
    )
    assert post("/completion", **settings, t_max_predict_ms=1e6)["content"] == whole


def test_prompts_are_texts_or_ids(client, post):
    ids = post("/tokenize", content="The sky is")["tokens"]
    assert post("/detokenize", tokens=ids) == {"content": "The sky is"}
    settings = dict(model="any", max_tokens=6, temperature=0)
    texts = [
        [choice.text for choice in client.completions.create(prompt=prompt, **settings).choices]
        for prompt in ("The sky is", ids, ["The sky is", "Two and"])
    ]
    assert texts[0] == texts[1] == texts[2][:1] and len(texts[2]) == 2
    native = post("/completion", prompt=ids, n_predict=6, temperature=0, return_tokens=True)
    assert native["content"] == texts[0][0] and len(native["tokens"]) == 6
    text = post("/apply-template", messages=HELLO)["prompt"]
    assert HELLO[0]["content"] in text


def test_texts_are_kept(post):
    """Each prompt is read from where it parts from a text before, and none of these is lost."""
    one, two = (post("/tokenize", content=f"{word} " * 300)["tokens"] for word in ("one", "two"))
    other, texts = one[:100] + two[:50], {}
    for ids, cached in ((one, 0), (two, 0), (other, 100), (one, 300), (two, 300), (other, 150)):
        settings = {"prompt": [*ids, 500], "n_predict": 4, "temperature": 0}
        answer = post("/completion", **settings)
        assert cached <= answer["timings"]["cache_n"] <= cached + 2
        assert answer["content"] == texts.setdefault(tuple(ids), answer["content"])


def test_the_example_runs(url, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["serve_client.py", url])
    monkeypatch.setenv("OPENAI_API_KEY", "the key")
    runpy.run_path(str(ROOT / "examples" / "serve_client.py"))
    assert "Paris" in capsys.readouterr().out


def test_diagnose_reads_the_counters(ask, post):
    pages = []
    for _ in range(2):
        post("/completion", prompt="One two three", n_predict=20, seed=1)  # planned times
        pages.append(parse(ask("/metrics").decode()))
    acceptance = plan_of_counters(*pages, 1.0, "here").contexts[0].acceptance
    assert acceptance.drafts > 0 and 0 < acceptance.accepted[0] <= acceptance.drafts
