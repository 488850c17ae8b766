"""`sequoia-plan profile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import json_option, model_options, read_sampling, sampling_options, seed_option
from sequoia_plan.planner.cli.pair import load_pair
from sequoia_plan.planner.cli.terminal import curve, numbers, print_json, progress

if TYPE_CHECKING:
    from sequoia_plan.artifacts import Profile


FOREIGN = 0.02
"""A draft of which less is accepted at the root does not fit its target. With layer ids that are off by one about a quarter is left."""


@click.command()
@model_options
@sampling_options(verifier="sequoia and traversal, for solve to choose from; one where they decide alike")
@click.option("--also", metavar="NAME=VALUE,...", multiple=True, help="A further setting, as temperature=0.6,top_p=0.9; written beside the output.")
@click.option("--prompts", type=click.Path(), help="JSONL (text, messages or turns; kind) or plain text; every second is left for bench. [default: built-in]")
@click.option("--tokens", type=click.IntRange(min=1), default=32, show_default=True, help="New tokens a prompt, at most.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="How often each prompt may be used, with another seed each time.")
@click.option("--precision", metavar="PERCENT", default="7%", show_default=True, help="Stop once predicted tokens a step are known to within this, at 95 %.")
@click.option("--method", type=click.Choice(["forced", "decoding"]), default="forced", show_default=True, help="How to measure; see docs/profiling.md.")
@click.option("--context", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens in the KV cache when latency is measured.")
@click.option("--latency-seconds", type=click.FloatRange(min=0), default=45.0, show_default=True, help="Seconds for repeating latency measurements.")
@click.option("--merge", metavar="PROFILE", type=click.Path(), multiple=True, help="Measure nothing: add these profiles' counts up.")
@seed_option
@click.option("-o", "--output", type=click.Path(), default="profile.yaml", show_default=True, help="Write the profile there.")
@json_option
def profile(
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    offload: str | None,
    memory: str | None,
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
    """Measure acceptance and latency on this machine. A run that was killed goes on where it was."""
    from sequoia_plan.artifacts.files import check_writable, refuse_to_replace

    if merge:
        from sequoia_plan.artifacts import Profile
        from sequoia_plan.artifacts.merge import merge as add_up

        profiles = [add_up([Profile.load(path) for path in merge], merge)]
        refuse_to_replace(output, *merge)
        profiles[0].save(output)
        _report({output: profiles[0]}, as_json)
        return

    from sequoia_plan.profiler import measure
    from sequoia_plan.profiler.journal import discard, journal_of
    from sequoia_plan.profiler.methods import BOTH
    from sequoia_plan.profiler.prompts import built_in, check_lengths, load, measuring_half

    given_settings = [settings, *(settings | _read_setting(text) for text in also)]
    samplings = [read_sampling(each) for each in given_settings]
    # one level, which `decoding` counts, tells nothing of how the two differ
    chosen = [bool(each["verifier"]) or method == "decoding" for each in given_settings]
    along = [() if alone else [name for name in BOTH if name != one.verifier] for alone, one in zip(chosen, samplings, strict=True)]
    enough = _read_percent(precision)
    outputs = [Path(output), *(Path(output).with_stem(f"{Path(output).stem}-{name}") for name in also)]
    if len(set(outputs)) < len(outputs):
        raise click.UsageError(f"--also {also[-1]}: given twice")
    for path in outputs:
        refuse_to_replace(path, prompts)
        check_writable(path)
    given = load(prompts) if prompts else None
    pair = load_pair(target, draft, device, dtype, offload, memory)
    if prompts and given:
        check_lengths(prompts, given, pair)
    texts = measuring_half(given) if given else built_in()
    journal = journal_of(output)
    with progress("acceptance", len(texts)) as say:
        profiles = measure(
            pair,
            texts,
            samplings,
            latency_seconds,
            context,
            on_size=lambda size, seconds: say(None, None, f"latency: {size} nodes {seconds * 1000:.1f} ms"),
            on_prompt=lambda done, most, found: say(
                done, most, f"acceptance: {found.trials.sum()} trials, sum {found.counts.sum() / max(found.trials.sum(), 1):.3f} +- {found.precision():.1%}"
            ),
            verifiers=along,
            method=method,
            precision=enough,
            tokens_per_prompt=tokens,
            rounds=rounds,
            seed=seed,
            journal=journal,
        )
    for found, path in zip(profiles, outputs, strict=True):
        found.save(path)
    discard(journal)
    accepted = sum(profiles[0].by_level[0])
    if accepted < FOREIGN:
        click.echo(
            f"Warning: of the draft's proposals for the next token {accepted:.1%} are accepted; it was probably made for another target, or it "
            "reads other hidden states than it was trained on",
            err=True,
        )
    _report({str(path): found for path, found in zip(outputs, profiles, strict=True)}, as_json)


def _report(profiles: dict[str, Profile], as_json: bool) -> None:
    """What was measured and where it is; latencies once, since all have the same."""
    latency = next(iter(profiles.values())).latency
    if as_json:
        times = {"target": latency.target, "draft": latency.draft} if latency else {}
        first, *also = [{"output": path} | _figures(p) | {"verifier": p.verifier} | times for path, p in profiles.items()]
        for facts, found in zip((first, *also), profiles.values(), strict=True):
            facts |= {"verifiers": {name: _figures(found.under(name)) for name in found.verifiers}} if found.verifiers else {}
        print_json(first | ({"also": also} if also else {}))
        return
    for path, each in profiles.items():
        for name in each.measured:
            found = each.under(name)
            click.echo(f"acceptance  {numbers(found.acceptance)}  (effective sample size {found.trials}{f', {name}' if each.verifiers else ''})")
            for level, row in enumerate(found.by_level):
                click.echo(f"  level {level}{'+' if level and level == len(found.by_level) - 1 else ' '}  {numbers(row)}  ({found.levels[level].trials})")
                if (off := found.levels[level].off) and off.trials:
                    click.echo(f"    off the spine  {numbers([count / off.trials for count in off.counts])}  ({off.trials})")
        click.echo(f"wrote {path}")
    if latency:
        click.echo(f"target      {curve(latency.target)}")
        click.echo(f"draft       {curve(latency.draft)}")
        click.echo(f"overhead    {latency.overhead * 1000:.2f} ms a step")
        placed = next(iter(profiles.values())).models.get("target", {})
        if latency.stream and "streamed_bytes" in placed:
            click.echo(
                f"streamed    {placed['streamed_bytes'] / 1e6:.0f} MB a pass in {latency.stream.seconds * 1000:.0f} ms; "
                f"{placed['resident_layers']} of {placed['layers']} layers, and {placed['resident_bytes'] / 1e6:.0f} MB in all, stay in memory"
            )


def _figures(profile: Profile) -> dict[str, Any]:
    return {"trials": profile.trials, "acceptance": profile.acceptance, "by_level": profile.by_level, "by_class": profile.by_class}


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
