"""What the profiler runs drafts with: a pass of any width, and passes over known text.

Decoding does not need these, so they are not methods of the drafters.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.base.tree_tensors import TreeTensors
from sequoia_plan.runtime.draft.dflash import DFlashDrafter
from sequoia_plan.runtime.draft.drafter import Drafter, DraftPass
from sequoia_plan.runtime.draft.eagle import EagleDrafter
from sequoia_plan.runtime.draft.language_model import LanguageModelDrafter, SelfDrafter
from sequoia_plan.runtime.models.forward import ForwardOutput


def representative_pass(
    drafter: Drafter, tensors: TreeTensors
) -> tuple[DraftPass, ForwardOutput | None]:
    """A draft pass whose time stands for passes of its width.

    The pass reads as many tokens as the tree has nodes, and draws one child of each into the slots
    after the tree. A DFlash pass is the same for every tree, and draws nothing: its drawing is
    timed together with the verification of trees.
    """
    if isinstance(drafter, DFlashDrafter):
        # logits of all levels are computed as after the root's token, but no node gets children
        nothing = tensors.nodes[:0]
        levels = torch.arange(drafter.model.block.levels, device=nothing.device)
        draft_pass = drafter.block_pass(
            tensors, levels, num_parents=1, max_children=1, draw_index=nothing, new_nodes=nothing
        )
        return draft_pass, None
    nodes = tensors.nodes
    draft_pass = DraftPass(
        input_slots=nodes,
        offsets=tensors.offsets,  # positions relative to the root's
        mask=tensors.mask,
        num_parents=nodes.numel(),
        max_children=1,
        draw_index=nodes,
        new_nodes=nodes + nodes.numel(),
        parent_rows=torch.zeros_like(nodes),
    )
    if not isinstance(drafter, EagleDrafter):
        return draft_pass, None
    width, dtype = drafter.model.feature_width, drafter.feature_dtype
    # every node reads row 0 of the previous output's features; its logits are not read
    features = torch.zeros(1, width, dtype=dtype, device=nodes.device)
    no_logits = features[:, :0]
    return draft_pass, ForwardOutput(no_logits, features)


def logits_over_text(
    drafter: Drafter,
    sequence: SequenceState,
    slots: Tensor,
    levels: Sequence[int],
    aux_hidden_states: Tensor | None,
) -> Tensor:
    """The draft's logits after tokens of a known text, as decoding steps would compute them.

    The level of a token matters to a draft that reads the target's hidden states: in a step, it has
    read those of tokens before the root only. `slots` int64 [positions]; `aux_hidden_states`
    [positions, width].
    """
    if isinstance(drafter, SelfDrafter):
        return _self_draft_logits(drafter, sequence, slots, levels)
    if isinstance(drafter, LanguageModelDrafter):  # its logits do not depend on the level
        columns = torch.arange(int(slots[-1]) + 1, device=slots.device)
        mask = additive_mask(columns <= slots[:, None], drafter.model.model.dtype)
        tokens = sequence.tokens[slots]
        return drafter.model(sequence.draft, tokens, slots, slots, mask).logits
    assert isinstance(drafter, EagleDrafter | DFlashDrafter) and aux_hidden_states is not None
    return _logits_by_step(drafter, sequence, slots, levels, aux_hidden_states)


def _self_draft_logits(
    drafter: SelfDrafter, sequence: SequenceState, slots: Tensor, levels: Sequence[int]
) -> Tensor:
    """`logits_over_text` for a draft that reads the target's cache, which is left as it is.

    A token attends to the target's keys and values before the root of its step, and to the draft's
    own from the root on. The draft's own are written behind the text in another cache.
    """
    end, count = int(slots[-1]) + 1, slots.numel()
    cache = drafter.new_cache(end + count)
    for own, targets in zip(cache.blocks, sequence.draft.blocks, strict=True):
        own[:, :, :, :end] = targets[:, :, :, :end]
    positions = torch.arange(count, device=slots.device)
    steps_begin = positions - torch.tensor(levels, device=slots.device).clamp(min=0)
    roots = steps_begin.clamp(min=0)
    sees_target = torch.arange(end, device=slots.device) < slots[roots][:, None]
    sees_draft = (positions <= positions[:, None]) & (positions >= roots[:, None])
    visible = torch.cat([sees_target, sees_draft], 1)
    mask = additive_mask(visible, drafter.model.model.dtype)
    tokens = sequence.tokens[slots]
    return drafter.model(cache, tokens, slots, end + positions, mask).logits


def _logits_by_step(
    drafter: EagleDrafter | DFlashDrafter,
    sequence: SequenceState,
    slots: Tensor,
    levels: Sequence[int],
    hidden_states: Tensor,
) -> Tensor:
    """`logits_over_text` step by step: each step is drafted as a chain whose tokens are known."""
    if isinstance(drafter, EagleDrafter):
        num_levels = max(max(levels), 0) + 1
    else:
        num_levels = drafter.model.block.levels
    chain = TokenTree.chain(num_levels + 1)  # the last level of a tree has no logits
    tensors = TreeTensors.of(chain, slots.device, drafter.model.dtype)
    # while a step is drafted, the sequence is as long as the text before its root
    length, passes = sequence.length.clone(), drafter.passes(chain, tensors)
    logits_of_steps = []
    for start, end in steps_of(levels):
        logits = torch.zeros(end - start, drafter.vocabulary, device=slots.device)
        if levels[start] == 0:
            sequence.length.copy_(slots[start : start + 1])
            extent = sequence.tokens.numel()  # attention looks at all slots
            columns = tensors.columns(sequence.length, extent)
            output, rows = None, []
            for draft_pass in passes[: end - start]:
                output = drafter.forward(draft_pass, sequence, columns, output)
                rows.append(output.logits.float())
            drafted = torch.cat(rows)[: end - start]
            logits[: len(drafted)] = drafted
        logits_of_steps.append(logits)
        accepted = slots[start:end], hidden_states[start:end]
        drafter.keep_hidden_states(sequence.draft, *accepted)
    sequence.length.copy_(length)
    return torch.cat(logits_of_steps)


def steps_of(levels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut positions into steps: ranges whose levels are 0, 1, 2, ..., or a position of level -1."""
    starts = [position for position, level in enumerate(levels) if level <= 0]
    return itertools.pairwise([*starts, len(levels)])
