"""vLLM's own counters of speculation, from a server's metrics page (Prometheus text), a file of it, or an engine's snapshot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.engine_plan import ChainAcceptance
from sequoia_plan.artifacts.files import read_bytes

PREFIX = "vllm:spec_decode_"
DRAFTS, ACCEPTED, BY_POSITION = f"{PREFIX}num_drafts", f"{PREFIX}num_accepted_tokens", f"{PREFIX}num_accepted_tokens_per_pos"
DRAFTED, GENERATED, FIRST = f"{PREFIX}num_draft_tokens", "vllm:generation_tokens", "vllm:time_to_first_token_seconds_count"
SAMPLE = re.compile(r'^([A-Za-z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
LARGEST_PAGE = 1 << 26
SECONDS = 10
"""How long a server may take to answer."""

Counters = dict[str, float]
"""Values by name, positions in brackets; those of several engines, models and processes added up."""


def fetch(source: str) -> tuple[Counters, str]:
    """The counters on a metrics page, and the page.

    Args:
        source: http(s) address of a server or of its /metrics page, or a file.

    Raises:
        SequoiaPlanError: if it cannot be read.
    """
    if not re.match(r"https?://", source):
        page = read_bytes(source, "a metrics page of vLLM (Prometheus text)", LARGEST_PAGE).decode(errors="replace")
        return parse(page), page
    from urllib.error import URLError
    from urllib.request import urlopen

    address = source if source.rstrip("/").endswith("/metrics") else f"{source.rstrip('/')}/metrics"
    try:
        with urlopen(address, timeout=SECONDS) as response:
            page = response.read(LARGEST_PAGE).decode(errors="replace")
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SequoiaPlanError(f"--metrics {source}: {address} cannot be read ({reason}); name a running vLLM server, or a file of its metrics") from error
    return parse(page), page


def parse(page: str) -> Counters:
    """The counters of speculation in Prometheus text, and those of tokens; `_total` is cut off, as vLLM's own snapshot names them."""
    found: Counters = {}
    for line in page.splitlines():
        match = SAMPLE.match(line.strip())
        if not match or match[1].endswith("_created"):
            continue
        labels, name = dict(LABEL.findall(match[2] or "")), match[1].removesuffix("_total")
        if not name.startswith(PREFIX) and name not in (GENERATED, FIRST):
            continue
        if name == BY_POSITION:
            name = f"{name}[{labels.get('position', '?')}]"
        try:
            found[name] = found.get(name, 0.0) + float(match[3])
        except ValueError:
            continue
    return found


def acceptance(after: Mapping[str, float], before: Mapping[str, float] | None = None, source: str = "", page: str | None = None) -> ChainAcceptance:
    """How far chains were accepted between two readings of the counters, or since the server started.

    Args:
        after, before: the later reading and, if any, the earlier one.
        source: where they are from; errors begin with it.
        page: the text of the later one, to tell a server without speculation from one without statistics.

    Raises:
        SequoiaPlanError: if there are no counters of speculation, they are of another version, were reset, or count nothing.
    """
    name = source or "counters"
    counted = sorted(each for each in after if each.startswith(PREFIX))
    if not counted:
        if page is not None and "vllm:" not in page:
            raise SequoiaPlanError(f"{name}: holds no metrics of vLLM; start the server without --disable-log-stats and read its /metrics page")
        raise SequoiaPlanError(f"{name}: vLLM counts no speculation; start the server with --speculative-config (and without --disable-log-stats)")
    positions = sorted(int(match[1]) for each in after if (match := re.fullmatch(rf"{re.escape(BY_POSITION)}\[(\d+)\]", each)))
    if DRAFTS not in after or not positions:
        raise SequoiaPlanError(
            f"{name}: found {', '.join(counted)[:200]}, expected {DRAFTS} and {BY_POSITION}; this version counts otherwise: use vLLM V1, 0.8.5 or later"
        )
    if positions != list(range(len(positions))):
        raise SequoiaPlanError(f"{name}: {BY_POSITION} has the positions {positions}, expected 0 to {len(positions) - 1}; read the whole page")

    def grown(each: str) -> float:
        return after.get(each, 0.0) - (before or {}).get(each, 0.0)

    drafts, accepted = grown(DRAFTS), [grown(f"{BY_POSITION}[{position}]") for position in positions]
    if min(drafts, *accepted) < 0:
        raise SequoiaPlanError(f"{name}: the counters are lower than before; the server was started anew: read both pages again")
    if drafts == 0:
        raise SequoiaPlanError(f"{name}: no drafts were counted; send the server requests, then read its metrics again")
    if ACCEPTED in after and abs(sum(accepted) - grown(ACCEPTED)) > 0.5:
        raise SequoiaPlanError(
            f"{name}: {BY_POSITION} adds up to {sum(accepted):g}, {ACCEPTED} is {grown(ACCEPTED):g}; this version counts otherwise, tell us which it is"
        )
    short = Path(source).name if source and "://" not in source else source
    if (length := grown(DRAFTED) / drafts) < 0.9 * len(accepted):
        short = f"{short}; chains of {length:.1f} tokens on average, {len(accepted)} at most".removeprefix("; ")
    # every step of a request yields one token and those accepted; its first token is from the prompt's pass, which drafts nothing
    steps = grown(GENERATED) - sum(accepted) - grown(FIRST) if {GENERATED, FIRST} <= after.keys() else 0.0
    share = min(1.0, drafts / steps) if steps > 0 else 1.0
    try:
        return ChainAcceptance(drafts=round(drafts), accepted=tuple(map(round, accepted)), share=round(share, 4), source=short)
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{name}: {error}") from error
