"""Generated command lines, and damaged files under them: each ends in its work or in one line."""

import itertools
import random
import re
import resource
import shutil
from types import SimpleNamespace

import click
import pytest
import torch
from architectures import tiny
from bench_results import figures_of
from commands import LATENCY, call

from sequoia_plan.artifacts import Acceptance, Counts, Profile, SequoiaPlanError
from sequoia_plan.artifacts.bench_result import Breakdown
from sequoia_plan.artifacts.counts import ClassCounts
from sequoia_plan.planner.cli import decoding, exchange, main, profiling
from sequoia_plan.runtime.pair import DEFAULT_DRAFT, load_pair

PROFILE = Profile(
    Acceptance.counted(Counts([[400]], [[[180, 40]]])),
    LATENCY,
    settings={"temperature": 0.6, "top_p": 0.9, "verifier": "traversal"},
    models={"target": {"name": "t", "digest": "0", "dtype": "float32", "placement": "fused"}},
    hardware={"threads": 2},
    prompts={name: [ClassCounts(50, (5 * i, 5))] * 2 for i, name in enumerate("abcd", 3)},
)
MODES = {
    "solve": "solve profile.yaml --budget 9 --depth 4 -o made",
    "tokens": "solve --acceptance p.json --budget 9 --depth 4 -o made",
    "show": "show t",
    "plot": "show t --plot new.svg",
    "nxd": "export t --format nxd -o made",
    "growmap": "export t --format growmap -o made",
    "draft": "export --format draft --draft smollm2-135m-draft -o made",
    "target": "export --format target -o made",
    "import": "import n.json -o made",
    "generate": "generate --tree t --max-new-tokens 16 --seed 5",
    "bench": "bench --tree t --prompts p.txt",
    "profile": "profile --prompts p.txt -o made",
    "vllm": "diagnose vllm --target model --speculative-config {} --python /no/such",
    "llamacpp": "diagnose llamacpp -m t -md t --server /no/such",
    "url": "diagnose --url http://127.0.0.1:9",
}
MODES = {mode: words.split() for mode, words in MODES.items()}
"""One command line for each way through a command. Those that need models end where they load."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with an input of each kind."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        PROFILE.save("profile.yaml")
        (folder / "p.json").write_text("[0.5, 0.2]")
        (folder / "n.json").write_text('{"0": ["1", "2"], "1": ["3"]}')
        (folder / "p.txt").write_text("\n\n".join(f"What is {n}?" for n in range(6)))
        assert call(*MODES["solve"][:-1], "t").exit_code == 0
    return folder


@pytest.fixture
def here(files, tmp_path, monkeypatch):
    """A copy of the folder; commands end where they would load models, and say with what."""

    def load_pair(*values, **named):
        raise SequoiaPlanError(f"models: {values} {named}")

    for module in (decoding, exchange, profiling):
        monkeypatch.setattr(module, "load_pair", load_pair)
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def checked(folder, words):
    """Run a command line; whatever it says, it ends well and leaves what was there.

    The folder is then as it was before.
    """
    before = contents(folder)
    outputs = [words[place + 1] for place, word in enumerate(words[:-1]) if word in OUTPUTS]
    result = call(*words)
    after = contents(folder)
    place = f"{words}\n{result.output}"
    assert result.exception is None or isinstance(result.exception, SystemExit), place
    assert result.exit_code in (0, 1, 2) and "Traceback" not in result.output, place
    assert "report it with" not in result.output, place  # an error that is not our own
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == (result.exit_code != 0), place
    assert not errors or not result.stdout, place
    lost = {name for name in before if after.get(name) != before[name]}
    assert lost <= set(outputs) and (not lost or result.exit_code == 0), place
    new = after.keys() - before.keys()
    assert new <= {*outputs, *(f"made/{name.split('/')[-1]}" for name in new)}, place
    for name in new:
        (folder / name).unlink()
    for name in lost:
        (folder / name).write_bytes(before[name])
    shutil.rmtree(folder / "made", ignore_errors=True)
    return result


OUTPUTS = ("-o", "--output", "--report", "--plot")
TEXTS = ". / .. no/such /no/such p.json profile.yaml t n.json new new.svg é none int8"
TEXTS = [*TEXTS.split(), "/dev/full", "", " ", "x" * 300]
NUMBERS = "0 1 2 -1 0.5 nan inf -inf 1e308 x 3% 1,2"
NUMBERS = [*NUMBERS.split(), "9" * 30, ""]


def values(parameter, rng):
    """Values of an option or an argument: right ones, wrong ones, odd ones."""
    if isinstance(parameter.type, click.Choice):
        return rng.choice([*parameter.type.choices, "x", ""])
    if parameter.type.name in ("name", "path"):
        return rng.choice(TEXTS)
    return rng.choice(NUMBERS if rng.random() < 0.8 else [*TEXTS, "{}", "[1]", "top_k=1"])


def command_of(words):
    command = main.commands[words[0]]
    return getattr(command, "commands", {}).get(words[1], command)


@pytest.mark.parametrize("seed", range(12))
def test_any_command_line(here, seed):
    """A way through a command, with up to three further options."""
    rng = random.Random(seed)
    for _ in range(COUNT):
        words = list(rng.choice(list(MODES.values())))
        options = [p for p in command_of(words).params if isinstance(p, click.Option)]
        for option in rng.sample(options, rng.randrange(min(4, len(options) + 1))):
            words.append(rng.choice(option.opts + option.secondary_opts))
            if not option.is_flag:
                words.append(values(option, rng))
        checked(here, words)


WITHOUT_EFFECT = {
    ("tokens", "lookup"),  # an acceptance has no counts of lookup
    ("solve", "lookup"),  # nor has this profile
    ("tokens", "objective"),  # it is the default there
}
"""Options that change nothing here, and may."""
NEED_MODELS = {"profile", "llamacpp", "vllm", "url"}
"""Ways that end before they use all options, for want of a model or a server."""
REAL = {"generate", "bench"}
VALUES = {"temperature": "9", "top_p": "0.01", "stop": "e", "rare_settings": "top_k=1",
          "regex": "[0-9]+", "draft_vocabulary": DEFAULT_DRAFT}  # fmt: skip
"""Right values of options, whose effect is seen."""


def effective(parameter):
    """A value of an option that is not its default."""
    if parameter.is_flag:
        return [(parameter.secondary_opts or parameter.opts)[0]]
    if isinstance(parameter.type, click.Choice):
        return [parameter.opts[0], parameter.type.choices[-1]]
    if parameter.name in VALUES:
        return [parameter.opts[0], VALUES[parameter.name]]
    if parameter.type.name in ("name", "path"):
        return [parameter.opts[0], "/no/such/new.svg"]
    return [parameter.opts[0], '{"no": 1}' if parameter.metavar == "JSON" else "2"]


@pytest.fixture
def real(pair, monkeypatch):
    """The real pair where it is asked for; what is loaded, and what bench is to do, is said."""

    def load(**models):
        is_default = set(models.values()) <= {None, "auto"}
        models["device"] = models["device"] or "cpu"
        models["dtype"] = models["dtype"].replace("auto", "float32")
        loaded = pair if is_default else load_pair(**models)
        click.echo(f"{loaded.metadata} {loaded.placement} {torch.get_num_threads()}", err=True)
        torch.set_num_threads(1)
        return loaded

    def compare(pair, load_pair, tree, trees, *work, journal, kinds):
        click.echo(f"{load_pair.keywords} {work[:-1]}", err=True)
        return figures_of(tree, sequoia=2.0)

    monkeypatch.setattr(decoding, "load_pair", load)
    monkeypatch.setattr("sequoia_plan.profiler.bench.compare", compare)
    parts = dict.fromkeys(Breakdown.__struct_fields__, 0.0)
    monkeypatch.setattr("sequoia_plan.profiler.breakdown.breakdown", lambda *_: parts)


@pytest.mark.parametrize("mode", [
    pytest.param(mode, marks=[pytest.mark.slow] * (mode in REAL))
    for mode in sorted(MODES.keys() - NEED_MODELS)
])  # fmt: skip
def test_no_option_is_ignored(here, mode, request):
    """Each option of each way through a command changes what happens, or is refused."""
    words = [*MODES[mode]]
    if mode in REAL:
        request.getfixturevalue("real")
    plain = outcome(here, words)
    assert plain == outcome(here, words) and plain[0] == (mode in ("draft", "target"))
    for option in command_of(words).params:
        if isinstance(option, click.Option) and not set(option.opts) & set(words):
            changed = outcome(here, [*words, *effective(option)])
            assert (changed != plain) != ((mode, option.name) in WITHOUT_EFFECT), option.name


def outcome(folder, words):
    """What a command says and writes, without its time."""
    result = call(*words)
    written = (folder / "made").read_bytes() if (folder / "made").is_file() else b""
    shutil.rmtree(folder / "made", ignore_errors=True)
    (folder / "made").unlink(missing_ok=True)
    said = re.sub(r"[0-9.]+ (tokens/)?s\b|seconds\S+ [0-9.e-]+", "", result.stdout + result.stderr)
    return result.exit_code, said, written


@pytest.mark.parametrize("mode", MODES)
def test_no_name_or_path_is_empty(here, mode):
    for option in command_of(MODES[mode]).params:
        if isinstance(option, click.Option) and option.type.name in ("name", "path"):
            assert checked(here, [*MODES[mode], option.opts[0], ""]).exit_code == 2, option.name


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("profile -o . --context 1,2", 1),
        ("profile -o / --context 1,2", 1),
        ("generate --tree t --sampling min_p=1e-3,top-k=4", 1),  # the models
        ("solve --depth 1 -o made", 0),  # the root alone may be the fastest
        ("solve --depth 1 --objective tokens -o made", 2),
        ("diagnose", 2),
    ],
)
def test_ends_of_the_possible(here, words, code):
    assert checked(here, words.split()).exit_code == code


@pytest.mark.parametrize("mode", MODES)
def test_an_output_never_replaces_what_it_is_made_from(here, mode):
    """Also by another name."""
    words = MODES[mode]
    options = {option for parameter in command_of(words).params for option in parameter.opts}
    for name, option in itertools.product({*words} & {*contents(here)}, options & {*OUTPUTS}):
        (here / "link.svg").unlink(missing_ok=True)
        (here / "link.svg").symlink_to(name)
        result = checked(here, [*words, option, "link.svg"])
        assert result.exit_code == 2 and "link.svg: is the input" in result.stderr


COUNT = 40


@pytest.mark.parametrize("room", [0, 20, 200, 4000])
@pytest.mark.parametrize(
    "mode", ["solve", "tokens", "nxd", "growmap", "draft", "target", "import", "plot"]
)
def test_a_full_disk(here, monkeypatch, mode, room):
    """The output is whole or as it was before; what was read and written is still there."""
    tokenizer, model = SimpleNamespace(save_pretrained=lambda folder: None), tiny("Llama")
    target = SimpleNamespace(module=model)
    pair = SimpleNamespace(target=target, tokenizer=tokenizer, metadata={"target": {"name": "m"}})
    monkeypatch.setattr(exchange, "load_pair", lambda *_, **__: pair)
    words = [word for word in MODES[mode] if word not in ("--draft", "smollm2-135m-draft")]
    if mode not in ("draft", "target"):
        (here / words[-1]).write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        result = checked(here, words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if result.exit_code:
        assert f"{words[-1]}: cannot be written (" in result.stderr
    else:
        assert room
