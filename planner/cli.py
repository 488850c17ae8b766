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
@click.option("--prompts", type=click.Path(), help="JSONL (text or messages) or plain text. [default: built-in prompts]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("-o", "--output", type=click.Path(), default="profile.yaml", show_default=True)
@_json_option
def profile(
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    prompts: str | None,
    seed: int,
    output: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure acceptance and latency on this machine."""
    from sequoia_plan.profiler import measure
    from sequoia_plan.profiler.prompts import built_in, load

    sampling = _sampling(settings)
    texts = load(prompts) if prompts else built_in()
    pair = _load_pair(target, draft, device, dtype)
    with _status("acceptance") as say:
        result = measure(
            pair,
            texts,
            sampling,
            seed=seed,
            on_prompt=lambda c: say(f"acceptance: {c.trials} steps, {1 + sum(c.vector()):.3f} tokens a step with a one-level tree"),
            on_size=lambda size, seconds: say(f"latency: {size} nodes {seconds * 1000:.1f} ms"),
        )
    result.save(output)
    latency = result.latency
    assert latency is not None
    if as_json:
        _print_json({"output": output, "trials": result.trials, "acceptance": result.acceptance, "target": latency.target, "draft": latency.draft})
        return
    click.echo(f"acceptance  {_numbers(result.acceptance)}  ({result.trials} steps)")
    click.echo(f"target      {_curve(latency.target)}")
    click.echo(f"draft       {_curve(latency.draft)}")
    click.echo(f"overhead    {latency.overhead * 1000:.2f} ms a step")
    click.echo(f"wrote {output}")


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


def _load_pair(target: str | None, draft: str | None, device: str | None, dtype: str) -> Pair:
    with _status("loading models"):
        import torch

        from sequoia_plan.runtime.models import load_pair

        return load_pair(target, draft, device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype)


def _warn_if_foreign(plan: Any, pair: Pair) -> None:
    """A tree stays exact with any pair, but its promise holds for the one it was measured on."""
    for role, facts in (plan.get("models") or {}).items():
        ours = pair.facts.get(role, {})
        if isinstance(facts, dict) and facts.get("digest") != ours.get("digest"):
            click.echo(f"Warning: the tree was solved for the {role} {facts.get('name')}, this is {ours.get('name')}; its predictions do not apply", err=True)


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
