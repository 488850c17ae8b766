"""`sequoia-plan profile`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import (
    json_option,
    model_options,
    parse_contexts,
    read_sampling,
    sampling_options,
    seed_option,
)
from sequoia_plan.planner.cli.pair import load_pair
from sequoia_plan.planner.cli.terminal import format_curve, format_probs, print_json, progress

if TYPE_CHECKING:
    from sequoia_plan.artifacts import Latency, Profile, TokenTree


MIN_FITTING_ACCEPTANCE = 0.02
"""A draft whose acceptance at the root is below this does not fit its target. Where layer ids are
off by one, about a quarter is still accepted."""

VERIFIER_DEFAULT = "traversal"
ALSO_HELP = "A further setting, as temperature=0.6,top_p=0.9; written beside the output."
CONTEXT_HELP = (
    "Tokens in the KV cache when latency is measured; of several, as 512,4096, each has a profile "
    "of its own, written beside the output."
)
PROMPTS_HELP = (
    "JSONL (text, messages or turns; kind) or plain text; every second is left for bench. "
    "[default: built-in]"
)
TREE_HELP = (
    "Count acceptance as this tree meets it: it writes the text. For trees of more than 16 nodes, "
    "once solve has made one. [default: a tree of 10 nodes]"
)
PRECISION_HELP = "Stop once predicted tokens a step are known to within this, at 95 %."


@click.command()
@model_options
@sampling_options(verifier_default=VERIFIER_DEFAULT)
@click.option("--also", metavar="NAME=VALUE,...", multiple=True, help=ALSO_HELP)
@click.option("--prompts", type=click.Path(), help=PROMPTS_HELP)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="New tokens a prompt, at most.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How often each prompt may be used, with another seed each time.",
)
@click.option(
    "--precision", metavar="PERCENT", default="7%", show_default=True, help=PRECISION_HELP
)
@click.option(
    "--method",
    type=click.Choice(["forced", "decoding"]),
    default="forced",
    show_default=True,
    help="How to measure; see docs/profiling.md.",
)
@click.option("--tree", "tree_file", metavar="TREE", type=click.Path(), help=TREE_HELP)
@click.option(
    "--context",
    "contexts",
    metavar="N,N,...",
    default="128",
    show_default=True,
    help=CONTEXT_HELP,
)
@click.option(
    "--latency-seconds",
    type=click.FloatRange(min=0),
    default=45.0,
    show_default=True,
    help="Seconds for repeating latency measurements.",
)
@seed_option
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    default="profile.yaml",
    show_default=True,
    help="Write the profile there.",
)
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
    tree_file: str | None,
    contexts: str,
    latency_seconds: float,
    seed: int,
    output: str,
    as_json: bool,
    **sampling_values: Any,
) -> None:
    """Measure acceptance and latency on this machine. A killed run goes on where it was."""
    from sequoia_plan.artifacts.files import check_writable, refuse_to_replace
    from sequoia_plan.artifacts.prompts import built_in, load, measuring_half
    from sequoia_plan.profiler import measure
    from sequoia_plan.profiler.journal import discard, exclusive, journal_of
    from sequoia_plan.profiler.prompts import check_lengths

    # The first setting is that of the options; each --also changes some of its values.
    values_of_settings = [sampling_values]
    values_of_settings += [sampling_values | _read_setting(text) for text in also]
    samplings = [read_sampling(values) for values in values_of_settings]
    relative_precision = _read_percent(precision)
    if tree_file and method != "forced":
        raise click.UsageError(f"--tree {tree_file}: needs --method forced")
    tree = _read_tree(tree_file) if tree_file else None
    first_context, *further_contexts = parse_contexts(contexts) or []

    main_output = Path(output)
    outputs = [
        main_output.with_stem("-".join([main_output.stem, *setting, *context]))
        for context in ([], *([f"context={number}"] for number in further_contexts))
        for setting in ([], *([text] for text in also))
    ]
    if len(set(outputs)) < len(outputs):
        raise click.UsageError(f"--also {also[-1]}: given twice")
    for path in outputs:
        refuse_to_replace(path, prompts, tree_file)
        check_writable(path)
    click.get_current_context().with_resource(exclusive(*outputs))
    own_prompts = load(prompts) if prompts else None
    pair = load_pair(target, draft, device, dtype, offload, memory)
    if prompts and own_prompts:
        check_lengths(prompts, own_prompts, pair)
    prompts_to_measure = measuring_half(own_prompts) if own_prompts else built_in()

    journal = journal_of(output)
    with progress("acceptance", len(prompts_to_measure)) as update:

        def on_size(size: int, seconds: float) -> None:
            """Show the seconds of a pass over `size` nodes."""
            update(text=f"latency: {size} nodes {seconds * 1000:.1f} ms")

        def on_prompt(completed: int, total: int, acceptance: Any) -> None:
            """Show the acceptance that the completed prompts give."""
            trials = acceptance.trials.sum()
            accepted_share = acceptance.counts.sum() / max(trials, 1)
            text = (
                f"acceptance: {trials} trials, "
                f"sum {accepted_share:.3f} +- {acceptance.precision():.1%}"
            )
            update(completed, total, text)

        profiles = measure(
            pair,
            prompts_to_measure,
            samplings,
            latency_seconds,
            [first_context, *further_contexts],
            on_size=on_size,
            on_prompt=on_prompt,
            tree=tree,
            method=method,
            precision=relative_precision,
            tokens_per_prompt=tokens,
            rounds=rounds,
            seed=seed,
            journal=journal,
        )
    for path, measured_profile in zip(outputs, profiles, strict=True):
        measured_profile.save(path)
    discard(journal)
    accepted_at_root = float(profiles[0].acceptance.rates[0, 0].sum())
    if accepted_at_root < MIN_FITTING_ACCEPTANCE:
        click.echo(
            f"Warning: of the draft's proposals for the next token {accepted_at_root:.1%} are "
            "accepted; it was probably made for another target, or it reads other hidden states "
            "than it was trained on",
            err=True,
        )
    profiles_by_path = zip(map(str, outputs), profiles, strict=True)
    _report(dict(profiles_by_path), as_json)


def _read_tree(path: str) -> TokenTree:
    """The tree of a file that is to write the text; of trees by match, that for no match."""
    from sequoia_plan.artifacts import TokenTree, load_tree

    tree = TokenTree(load_tree(path).parents)
    if tree.size == 1:
        raise click.UsageError(f"--tree {path}: found a tree of 1 node, expected one that drafts")
    return tree


def _report(profiles: Mapping[str, Profile], as_json: bool) -> None:
    """Print the acceptance of each profile and the path of its file, then the latency."""
    if as_json:
        entries = [_json_entry(path, profile) for path, profile in profiles.items()]
        main_entry, *further_entries = entries
        print_json(main_entry | ({"also": further_entries} if further_entries else {}))
        return
    contexts = list(dict.fromkeys(p.latency and p.latency.context for p in profiles.values()))
    for path, profile in profiles.items():
        if (profile.latency and profile.latency.context) == contexts[0]:
            _print_acceptance(profile)
            _print_lookup(profile)
        click.echo(f"wrote {path}")
    for context in contexts:
        profile = next(p for p in profiles.values() if (p.latency and p.latency.context) == context)
        if profile.latency:
            if len(contexts) > 1:
                click.echo(f"context     {context} tokens")
            _print_latency(profile.latency, profile.models.get("target", {}))


def _json_entry(path: str, profile: Profile) -> dict[str, Any]:
    """The JSON object of a profile: its path, its acceptance, and pass times.

    `lookup` has a summary of each class of matches (`ClassSummary`), if they were counted.
    """
    entry = {"output": path} | _acceptance_fields(profile) | {"verifier": profile.verifier}
    if profile.latency:
        entry |= {"target": profile.latency.target, "draft": profile.latency.draft}
    if profile.lookup:
        from sequoia_plan.artifacts.lookup import class_summaries

        entry["lookup"] = [summary._asdict() for summary in class_summaries(profile.lookup)]
    return entry


def _acceptance_fields(profile: Profile) -> dict[str, Any]:
    """Acceptance by rank over all levels, by level, and by node class where the classes differ."""
    acceptance, rates = profile.acceptance, profile.acceptance.rates
    return {
        "effective_trials": profile.effective_trials,
        "acceptance": acceptance.pooled().tolist(),
        "by_level": acceptance.with_one_class().rates[:, 0].tolist(),
        "by_class": rates.tolist() if rates.shape[1] > 1 else [],
    }


def _print_acceptance(profile: Profile) -> None:
    """Print acceptance by rank: over all levels, by level, and off the spine."""
    acceptance, counts = profile.acceptance, profile.acceptance.counts
    assert counts is not None
    click.echo(
        f"acceptance  {format_probs(acceptance.pooled())}  "
        f"(effective sample size {profile.effective_trials})"
    )
    for level, rates in enumerate(acceptance.with_one_class().rates[:, 0]):
        sign = "+" if level and level == counts.num_levels - 1 else " "
        num_trials = int(counts.trials[level].sum())
        click.echo(f"  level {level}{sign}  {format_probs(rates)}  ({num_trials})")
        if counts.num_classes > 1 and counts.trials[level, 1]:
            off_trials = int(counts.trials[level, 1])
            off_rates = counts.accepted[level, 1] / off_trials
            click.echo(f"    off the spine  {format_probs(off_rates)}  ({off_trials})")


def _print_lookup(profile: Profile) -> None:
    """Print, by length of the match, how often it comes up and how far its lookup chain holds.

    The match is the longest suffix of the text that occurs earlier in it, and the lookup chain is
    what follows there: `accepted` is of its first token, `run` the number of its tokens that come
    next in the text, on average.
    """
    from sequoia_plan.artifacts.lookup import class_summaries

    if not profile.lookup:
        return
    summaries = class_summaries(profile.lookup)
    click.echo("lookup      match   share   accepted    run")
    next_lengths = [summary.match_length for summary in summaries[1:]]
    for summary, next_length in zip(summaries, [*next_lengths, None], strict=True):
        first, last = summary.match_length, next_length and next_length - 1
        name = f"{first}+" if last is None else f"{first}" if first == last else f"{first}-{last}"
        accepted = "" if summary.accepted is None else f"{summary.accepted:.1%}"
        mean_run = "" if summary.mean_run is None else f"{summary.mean_run:.1f}"
        line = f"            {name:<5}  {summary.share:>6.1%}  {accepted:>9}  {mean_run:>5}"
        click.echo(line.rstrip())


def _print_latency(latency: Latency, target_metadata: Mapping[str, Any]) -> None:
    """Print the time of the target's and the draft's pass by number of tokens, and of streaming.

    If the target's weights do not fit into the memory of the device that computes, every pass
    streams some layers there, from the host's memory or a file. Then the streamed megabytes and
    what stays in that memory are printed, too.
    """
    click.echo(f"target      {format_curve(latency.target)}")
    click.echo(f"draft       {format_curve(latency.draft)}")
    click.echo(f"overhead    {latency.overhead * 1000:.2f} ms a step")
    if latency.stream and "streamed_bytes" in target_metadata:
        streamed_megabytes = target_metadata["streamed_bytes"] / 1e6
        resident_megabytes = target_metadata["resident_bytes"] / 1e6
        resident_layers, layers = target_metadata["resident_layers"], target_metadata["layers"]
        click.echo(
            f"streamed    {streamed_megabytes:.0f} MB a pass "
            f"in {latency.stream.seconds * 1000:.0f} ms; "
            f"{resident_layers} of {layers} layers, "
            f"and {resident_megabytes:.0f} MB in all, stay in memory"
        )


def _read_setting(text: str) -> dict[str, Any]:
    """Parse the value of --also, as "temperature=0.6,top_p=0.9", to values by name.

    The names are those of the fields of `Sampling`; "top-p" is read as "top_p".
    """
    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.runtime import Sampling

    field_names = Sampling().settings()
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        name = name.replace("-", "_")
        try:
            if name == "verifier":
                values[name] = value
            elif name == "top_k":
                values[name] = int(value)
            else:
                values[name] = float(value)
            is_valid = name in field_names
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ArgumentError(
                f"--also {text}: found {part.strip()!r}, "
                f"expected NAME=VALUE with a NAME of {', '.join(field_names)}"
            )
    return values


def _read_percent(text: str) -> float:
    """Parse the value of --precision: "2.5%" or "0.025" is 0.025."""
    from sequoia_plan.artifacts import ArgumentError

    try:
        fraction = float(text.rstrip("% ")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise ArgumentError(
            f"--precision {text}: expected a percentage, as 2%, from 0% to below 100%"
        )
    return fraction
