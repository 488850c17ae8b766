"""The command line. The one module that knows every layer, and only inside its commands: `--help` stays instant."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sequoia_plan.runtime import Pair, Sampling

DEFAULT_PROMPT = "Explain how a refrigerator keeps food cold."


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Turn our own errors into one line and an exit code."""
        from sequoia_plan.artifacts.errors import SequoiaPlanError

        try:
            return super().invoke(ctx)
        except SequoiaPlanError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
_model_options = _options(
    click.option("--target", metavar="ID|DIR|FILE.gguf", help="Target model. [default: the embedded SmolLM2-135M-Instruct]"),
    click.option("--draft", metavar="ID|DIR|FILE", help="Draft model, or a draft .safetensors made for the target. [default: the embedded draft]"),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda if there is one]"),
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True),
)
VERIFIERS = ["sequoia", "traversal", "specinfer", "spectr", "topk"]  # a test compares them with the runtime's


def _sampling_options(default: str | None = None) -> Callable[[Any], Any]:
    """Options named as the fields of `Sampling`; None where not given. `default` says what then holds, if not the values here."""

    def option(name: str, type_: Any, value: str, text: str) -> Any:
        return click.option(name, type=type_, help=f"{text} [default: {default or value}]")

    return _options(
        option("--temperature", float, "0", "Of the target's sampling; 0 is greedy."),
        option("--top-p", float, "1", "Keep the most probable tokens with this mass."),
        option("--top-k", int, "0", "Keep so many of the most probable tokens; 0 keeps all."),
        option("--min-p", float, "0", "Keep tokens at least this fraction as probable as the first."),
        option("--draft-temperature", float, "the target's", "Of the law that children are drawn from."),
        option("--verifier", click.Choice(VERIFIERS), "the runtime's", "What accepts drafted tokens; see docs/verifiers.md."),
    )


def _sampling(given: dict[str, Any], made_for: Any = None) -> Sampling:
    """What was given on the command line, else what the tree was made for, else the defaults."""
    from sequoia_plan.runtime.sampling import Sampling

    names = Sampling().settings().keys()
    chosen = {name: (made_for or {}).get(name) if given.get(name) is None else given[name] for name in names}
    return Sampling(**{name: value for name, value in chosen.items() if value is not None})


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sequoia-plan")
def main() -> None:
    """Compile speculation trees: measure a draft and a target, solve for the best token tree, decode with it exactly."""


@main.command()
@_model_options
@_sampling_options()
@click.option("--also", metavar="NAME=VALUE,...", multiple=True, help="A further setting, as temperature=0.6,top_p=0.9; written beside the output.")
@click.option("--prompts", type=click.Path(), help="JSONL (text or messages) or plain text. [default: built-in prompts]")
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="New tokens a prompt, at most.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="How often prompts may be sampled from, each time anew.")
@click.option("--precision", metavar="PERCENT", default="2.5%", show_default=True, help="Stop once predicted tokens a step are known to +- this.")
@click.option("--method", type=click.Choice(["forced", "decoding"]), default="forced", show_default=True, help="See docs/profiling.md.")
@click.option("--context", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens in the KV cache when latency is measured.")
@click.option("--latency-seconds", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Time for repeating latency measurements.")
@click.option("--merge", metavar="PROFILE", type=click.Path(), multiple=True, help="Measure nothing: add these profiles' counts up.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("-o", "--output", type=click.Path(), default="profile.yaml", show_default=True)
@_json_option
def profile(
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    also: tuple[str, ...],
    prompts: str | None,
    tokens: int,
    rounds: int,
    precision: str,
    method: str,
    context: int,
    latency_seconds: float,
    merge: tuple[str, ...],
    seed: int,
    output: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure acceptance and latency on this machine. Killed and started again, it goes on where it was."""
    outputs = [Path(output), *(Path(output).with_stem(f"{Path(output).stem}-{name}") for name in also)]
    if merge:
        from sequoia_plan.artifacts import Profile
        from sequoia_plan.artifacts.merge import merge as add_up

        results = [add_up([Profile.load(path) for path in merge], merge)]
        results[0].save(output)
    else:
        from sequoia_plan.profiler import measure
        from sequoia_plan.profiler.prompts import built_in, load

        samplings = [_sampling(settings), *(_sampling(settings | _read_setting(text)) for text in also)]
        enough = _read_percent(precision)
        texts = load(prompts) if prompts else built_in()
        pair = _load_pair(target, draft, device, dtype)
        journal = Path(output).with_name(f".{Path(output).name}.journal")
        with _progress("acceptance", len(texts)) as say:
            results = measure(
                pair,
                texts,
                samplings,
                latency_seconds,
                context,
                on_size=lambda size, seconds: say(None, None, f"latency: {size} nodes {seconds * 1000:.1f} ms"),
                on_prompt=lambda done, most, found: say(
                    done, most, f"acceptance: {found.trials.sum()} trials, sum {found.counts.sum() / max(found.trials.sum(), 1):.3f} +- {found.precision():.1%}"
                ),
                method=method,
                precision=enough,
                tokens_per_prompt=tokens,
                rounds=rounds,
                seed=seed,
                journal=journal,
            )
        for result, path in zip(results, outputs, strict=True):
            result.save(path)
        journal.unlink(missing_ok=True)
    if as_json:
        facts = [
            {"output": str(path), "trials": r.trials, "acceptance": r.acceptance, "by_level": r.by_level}
            | ({"target": r.latency.target, "draft": r.latency.draft} if r.latency else {})
            for r, path in zip(results, outputs, strict=False)
        ]
        _print_json(facts[0] | ({"also": facts[1:]} if also else {}))
        return
    for result, path in zip(results, outputs, strict=False):
        click.echo(f"acceptance  {_numbers(result.acceptance)}  ({result.trials} trials)")
        for level, row in enumerate(result.by_level):
            click.echo(f"  level {level}{'+' if level and level == len(result.by_level) - 1 else ' '}  {_numbers(row)}  ({result.levels[level].trials})")
        if result.latency and path == outputs[-1]:
            click.echo(f"target      {_curve(result.latency.target)}")
            click.echo(f"draft       {_curve(result.latency.draft)}")
            click.echo(f"overhead    {result.latency.overhead * 1000:.2f} ms a step")
        click.echo(f"wrote {path}")


@main.command()
@click.argument("profile_file", metavar="[PROFILE]", type=click.Path(), required=False)
@click.option("--budget", type=click.IntRange(min=1), default=768, show_default=True, help="Nodes, the root included.")
@click.option("--depth", type=click.IntRange(min=1), default=20, show_default=True, help="Levels, the root's included.")
@click.option("--branching", type=click.IntRange(min=1), help="Children a node may have. [default: the acceptance vector's length]")
@click.option("--objective", type=click.Choice(["speed", "tokens", "paper"]), help="[default: speed with a profile, tokens with --acceptance]")
@click.option("--acceptance", type=click.Path(), help="Instead of a profile: JSON or YAML list p[1..B], or a list of such rows per level.")
@click.option("--solver", type=click.Choice(["best-first", "hull", "dp"]), help="[default: best-first where it is exact, else hull]")
@click.option("--smooth", is_flag=True, help="Assume that rarer ranks are not likelier: the closest non-increasing vector is solved for.")
@click.option("--baseline", metavar="NAME", help="Do not solve: chain, chains:K, k-ary:K, specinfer:K1,K2,..., random:SEED or parents:FILE.")
@click.option("-o", "--output", type=click.Path(), default="tree.safetensors", show_default=True)
@_json_option
def solve(
    profile_file: str | None,
    budget: int,
    depth: int,
    branching: int | None,
    objective: str | None,
    acceptance: str | None,
    solver: str | None,
    smooth: bool,
    baseline: str | None,
    output: str,
    as_json: bool,
) -> None:
    """Compile the best token tree for PROFILE (default: profile.yaml)."""
    if profile_file and acceptance:
        raise click.UsageError("give either PROFILE or --acceptance, not both")
    from sequoia_plan.artifacts import Profile, save_tree
    from sequoia_plan.planner.solver import solve as run

    measured = _read_acceptance(acceptance) if acceptance else Profile.load(profile_file or "profile.yaml")
    solution = run(measured, budget, depth, branching, objective, solver, smooth, baseline)
    save_tree(solution.tree, output)
    tree = solution.tree
    if as_json:
        _print_json(
            {
                "size": tree.size,
                "depth": tree.depth,
                "branching": tree.branching,
                "expected_tokens": solution.expected_tokens,
                "upper_bound": solution.upper_bound,
                "predicted_speedup": solution.predicted_speedup,
                "speedup_bound": solution.speedup_bound,
                "interval": solution.interval,
                "parents": tree.parents.tolist(),
                "solver": solution.solver,
                "seconds": solution.seconds,
            }
        )
        return
    click.echo(f"{tree.size} nodes, depth {tree.depth}, level widths {' '.join(map(str, tree.level_widths))}  ({solution.solver}, {solution.seconds:.3f} s)")
    interval = solution.interval or {}
    click.echo(f"expected tokens a step  {solution.expected_tokens:.4f}{_between(interval.get('expected_tokens'))}")
    if solution.predicted_speedup is not None:
        click.echo(f"predicted speed-up      {solution.predicted_speedup:.3f}x over plain decoding{_between(interval.get('predicted_speedup'))}")
    if interval.get("lost"):
        click.echo("lost if the truth is at an end of the interval: {:.2%} and {:.2%}".format(*interval["lost"]))
    if solution.predicted_speedup is not None and tree.size == 1:
        click.echo("no tree is faster than plain decoding with these measurements: do not speculate")
    click.echo(f"wrote {output}")


@main.command()
@click.argument("tree_file", metavar="[TREE]", type=click.Path(), default="tree.safetensors")
@click.option("--plot", type=click.Path(), help="Draw the tree, F against size, and speed over size and depth into a .png or .svg file.")
@_json_option
def show(tree_file: str, plot: str | None, as_json: bool) -> None:
    """Show a compiled tree: a file (default: tree.safetensors) or a name of the catalog."""
    from sequoia_plan.artifacts import load_tree

    tree = load_tree(tree_file)
    if plot:
        from sequoia_plan.planner.plot import draw

        draw(tree, plot)
    if as_json:
        facts = {"size": tree.size, "depth": tree.depth, "branching": tree.branching, "level_widths": tree.level_widths.tolist()}
        _print_json({**facts, "parents": tree.parents.tolist(), "plan": tree.plan, "plot": plot})
        return
    from sequoia_plan.planner.summary import summarise

    summarise(tree)
    if plot:
        click.echo(f"wrote {plot}")


@main.command("export")
@click.argument("tree_file", metavar="TREE", type=click.Path())
@click.option("--format", "form", type=click.Choice(["medusa", "nxd", "growmap", "dot"]), required=True, help="Of the other engine; dot is Graphviz.")
@click.option("-o", "--output", type=click.Path(), required=True, help="A growmap is saved by torch, or as JSON if the name ends in .json.")
@_json_option
def export_command(tree_file: str, form: str, output: str, as_json: bool) -> None:
    """Write TREE (a file or a name of the catalog) for another engine."""
    from sequoia_plan.artifacts import load_tree
    from sequoia_plan.artifacts.interchange import export_tree

    tree = load_tree(tree_file)
    export_tree(tree, output, form)
    if as_json:
        _print_json({"output": output, "format": form, "size": tree.size, "depth": tree.depth})
        return
    click.echo(f"wrote {output}: {tree.size} nodes as {form}")


@main.command("import")
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("-o", "--output", type=click.Path(), default="tree.safetensors", show_default=True)
@_json_option
def import_command(file: str, output: str, as_json: bool) -> None:
    """Read a tree of another engine: Medusa choices, an NxD token tree, a growmap. The content tells which."""
    from sequoia_plan.artifacts import save_tree
    from sequoia_plan.artifacts.interchange import import_tree

    tree = import_tree(file)
    save_tree(tree, output)
    if as_json:
        _print_json({"output": output, "size": tree.size, "depth": tree.depth, "branching": tree.branching, "parents": tree.parents.tolist()})
        return
    click.echo(f"wrote {output}: {tree.size} nodes, depth {tree.depth}, level widths {' '.join(map(str, tree.level_widths))}")


@main.command()
@click.option("--tree", "tree_file", type=click.Path(), default="tree.safetensors", show_default=True)
@_model_options
@click.option("--prompt", default=DEFAULT_PROMPT, show_default=True, help="The user's message; - reads it from stdin.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@_sampling_options("what the tree was made for")
@click.option("--seed", type=int, default=0, show_default=True)
@_json_option
def generate(
    tree_file: str,
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    prompt: str,
    max_new_tokens: int,
    seed: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """Generate text with a compiled tree."""
    from sequoia_plan.artifacts import load_tree

    tree = load_tree(tree_file)
    made_for = tree.plan.get("settings") or {}
    sampling = _sampling(settings, made_for)
    text = sys.stdin.read() if prompt == "-" else prompt
    pair = _load_pair(target, draft, device, dtype)
    _warn_if_foreign(tree.plan, pair)
    measured = made_for.get("verifier", sampling.verifier)
    if measured != sampling.verifier and not sampling.greedy:
        click.echo(f"Warning: the tree was solved for the verifier {measured}, this is {sampling.verifier}; its predictions do not apply", err=True)

    from transformers import TextStreamer

    from sequoia_plan.profiler.prompts import encode
    from sequoia_plan.runtime import SequoiaDecoder

    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    streamer = None if as_json else TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    result = decoder.generate(
        encode(pair.tokenizer, text), max_new_tokens, seed=seed, eos_token_id=pair.tokenizer.eos_token_id, streamer=streamer, sampling=sampling
    )
    tokens = result.sequences[0, -result.new_tokens :].tolist()
    if as_json:
        _print_json(
            {
                "text": pair.tokenizer.decode(tokens, skip_special_tokens=True),
                "tokens": tokens,
                "new_tokens": result.new_tokens,
                "steps": result.steps,
                "tokens_per_step": result.tokens_per_step,
                "seconds": result.seconds,
            }
        )
        return
    expected = tree.plan.get("expected_tokens")
    click.echo(
        f"[{result.new_tokens} tokens, {result.steps} steps, {result.tokens_per_step:.2f} tokens a step"
        + (f" (predicted {expected:.2f})" if expected else "")
        + f", {result.new_tokens / result.seconds:.1f} tokens/s, ended by {result.finish_reason}]",
        err=True,
    )


@main.command()
@click.option("--tree", "tree_file", type=click.Path(), default="tree.safetensors", show_default=True)
@_model_options
@click.option("--prompts", type=click.IntRange(min=1), default=12, show_default=True, help="How many of the held-out prompts.")
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="New tokens a prompt, at most.")
@click.option("--only", metavar="NAME", multiple=True, help="A contender; may be repeated. [default: all]")
@_sampling_options("what the tree was made for")
@click.option("-o", "--output", type=click.Path(), help="Write the figures there, as JSON.")
@click.option("--report", type=click.Path(), help="Write an HTML page: figures and plots in one file, for mailing.")
@click.option(
    "--with", "others", metavar="FILE.json", type=click.Path(), multiple=True, help="Figures of earlier runs, as of other temperatures, for the page."
)
@_json_option
def bench(
    tree_file: str,
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    prompts: int,
    tokens: int,
    only: tuple[str, ...],
    output: str | None,
    report: str | None,
    others: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Decode held-out prompts with a compiled tree and its peers, side by side."""
    from sequoia_plan.artifacts import load_tree
    from sequoia_plan.artifacts.files import write_atomically
    from sequoia_plan.planner.contenders import arms, predicted
    from sequoia_plan.planner.report import print_table
    from sequoia_plan.profiler.bench import bench as run
    from sequoia_plan.profiler.bench import contenders, needs_reference, settings_and_hardware, summary
    from sequoia_plan.profiler.prompts import built_in, encode

    tree = load_tree(tree_file)
    sampling = _sampling(settings, tree.plan.get("settings") or {})
    earlier = [_read_figures(path) for path in others]
    trees = arms(tree)
    pair = _load_pair(target, draft, device, dtype)
    _warn_if_foreign(tree.plan, pair)
    reference = _load_pair(target, draft, device, dtype, packed=False) if needs_reference(pair, only) else pair
    decoders = contenders(pair, reference, trees, sampling, tokens, only)
    held_out = [encode(pair.tokenizer, text) for text in built_in(held_out=True)[:prompts]]
    with _progress("bench", len(held_out)) as advance:
        figures = summary(run(decoders, held_out, advance))
    for name, found in figures.items():
        found["predicted"] = predicted(trees[name], tree.plan) if name in trees else None
    shape = {"size": tree.size, "depth": tree.depth, "level_widths": tree.level_widths.tolist()}
    result = settings_and_hardware(pair, sampling, len(held_out), tokens) | {"tree": shape, "contenders": figures}
    if output:
        write_atomically(output, (json.dumps(result, indent=1) + "\n").encode())
    if report:
        from sequoia_plan.planner.page import page

        write_atomically(report, page(tree, [result, *earlier]).encode())
    if as_json:
        _print_json(result)
        return
    print_table(result)
    if report:
        click.echo(f"wrote {report}")
    if output:
        click.echo(f"wrote {output}")


def _load_pair(target: str | None, draft: str | None, device: str | None, dtype: str, packed: bool = True) -> Pair:
    with _status("loading models"):
        import torch

        from sequoia_plan.runtime.models import load_pair

        return load_pair(target, draft, device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype, packed)


def _warn_if_foreign(plan: Any, pair: Pair) -> None:
    """A tree stays exact with any pair, but its promise holds for the one it was measured on."""
    for role, facts in (plan.get("models") or {}).items():
        ours = pair.facts.get(role, {})
        if isinstance(facts, dict) and facts.get("digest") != ours.get("digest"):
            click.echo(f"Warning: the tree was solved for the {role} {facts.get('name')}, this is {ours.get('name')}; its predictions do not apply", err=True)
        elif isinstance(facts, dict) and facts.get("dtype") != ours.get("dtype"):
            click.echo(
                f"Warning: the tree was solved for the {role} in {facts.get('dtype')}, this is {ours.get('dtype')}; its speed is not as predicted", err=True
            )
    if plan.get("latency"):
        from sequoia_plan.profiler.hardware import differences, fingerprint

        for line in differences(plan.get("hardware") or {}, fingerprint(pair.target.device)):
            click.echo(f"Warning: the tree was solved for another machine ({line}); its speed is not as predicted", err=True)


def _read_setting(text: str) -> dict[str, Any]:
    """temperature=0.6,top_p=0.9 -> a setting; names as the fields of `Sampling`."""
    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.runtime.sampling import Sampling

    known, found = Sampling().settings(), {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        name = name.replace("-", "_")
        try:
            found[name] = value if name == "verifier" else (int if name == "top_k" else float)(value)
        except ValueError:
            name = ""
        if name not in known:
            raise ArgumentError(f"--also {text}: found {part.strip()!r}, expected NAME=VALUE with a NAME of {', '.join(known)}")
    return found


def _read_percent(text: str) -> float:
    """2.5% or 0.025 -> 0.025."""
    from sequoia_plan.artifacts import ArgumentError

    try:
        value = float(text.rstrip("% ")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ArgumentError(f"--precision {text}: expected a percentage, as 2%, from 0% to below 100%")
    return value


def _read_figures(path: str) -> Any:
    """What an earlier bench wrote."""
    from sequoia_plan.artifacts import SequoiaPlanError
    from sequoia_plan.artifacts.files import read_bytes

    try:
        found = json.loads(read_bytes(path, "figures written by sequoia-plan bench"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not {"settings", "models", "hardware", "tree", "contenders"} <= found.keys():
        raise SequoiaPlanError(f"{path}: not figures of bench; expected what sequoia-plan bench -o wrote")
    return found


def _read_acceptance(path: str) -> Any:
    """A JSON or YAML list; JSON first, because YAML 1.1 reads 1e-5 as text."""
    from sequoia_plan.artifacts import SequoiaPlanError
    from sequoia_plan.artifacts.files import read_bytes

    data = read_bytes(path, "a JSON or YAML list of probabilities")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        pass
    import yaml  # here, because most files are JSON

    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SequoiaPlanError(f"{path}: neither JSON nor YAML; expected a list of probabilities p[1], p[2], ...") from error


@contextmanager
def _status(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr when that is a terminal; silent otherwise."""
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


@contextmanager
def _progress(text: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar on stderr when that is a terminal; silent otherwise."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)

        def say(done: int | None = None, total: int | None = None, text: str | None = None) -> None:
            progress.update(task, completed=done, total=total, description=text)

        yield say


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value))


def _between(ends: Any) -> str:
    return f"  (95 %: {ends[0]:.3f} to {ends[1]:.3f})" if ends else ""


def _numbers(values: Any) -> str:
    return " ".join(f"{v:.3f}" for v in values)


def _curve(points: Any) -> str:
    return "  ".join(f"{n}: {seconds * 1000:.1f} ms" for n, seconds in points.items())


if __name__ == "__main__":
    main(prog_name=Path(sys.argv[0]).name)
