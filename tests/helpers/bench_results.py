"""Results of bench that are what their numbers say."""

from msgspec.structs import replace

from sequoia_plan.artifacts import BenchResult, Plan, TokenTree
from sequoia_plan.artifacts.bench_result import BenchSettings, Prediction, Ratio, TreeShape
from sequoia_plan.artifacts.plan import Interval
from sequoia_plan.profiler.bench_figures import predicted_by_kind, summary
from sequoia_plan.profiler.decoding_methods import PromptRun
from sequoia_plan.runtime import Sampling

LATENCY = {"target": {1: 0.04, 8: 0.05}, "draft": {1: 0.002, 8: 0.003}}
TREE = TokenTree([-1, 0, 0, 1, 1, 2, 3], {"acceptance": [0.5, 0.25], "latency": LATENCY})
KINDS_PLAN = Plan(
    text_speedups={"copy": (3.0,), "chat": (1.2, 1.2)},
    tokens_by_kind={"copy": 6.0, "chat": 2},
    interval_new_kind=Interval(predicted_speedup=(1.0, 4.0)),
)
MIXTURE = Prediction(4.0, 2.0, (1.9, 2.1))


def figures_of(tree, /, sampling=None, **speedups):
    """These speed-ups over plain decoding, each with an interval of 0.1 to both sides."""
    methods = summary({name: [PromptRun(4, 3, 2.0, 1, 1.0)] for name in ("plain", *speedups)})
    for name, method in methods.items():
        ratios = {}
        for reference in method.speedup:
            ratio = speedups.get(name, 1.0) / speedups.get(reference, 1.0)
            ratios[reference] = Ratio(ratio, ratio, ratio, ratio - 0.1, ratio + 0.1)
        methods[name] = replace(method, speedup=ratios)
    settings = BenchSettings((sampling or Sampling()).settings(), "float32", 1, 4)
    models = {"target": {"name": "<script>alert(1)</script>"}}
    return BenchResult(settings, models, {}, methods, TreeShape(tree.size, tree.depth))


def decoded_by_kind(kinds):
    """The tree's result on prompts of these kinds, with the mixture's prediction until then.

    Each is as fast as its kind and as long as its number in the list says.
    """
    plain, ours = [], []
    for number, kind in enumerate(kinds):
        new_tokens = 30 * (number + 1)
        seconds = new_tokens / KINDS_PLAN.text_speedups.get(kind, (2.0,))[0]
        steps = int(new_tokens // KINDS_PLAN.tokens_by_kind.get(kind, 4.0))
        plain.append(PromptRun(new_tokens, new_tokens, float(new_tokens), 0, 0.0))
        ours.append(PromptRun(new_tokens, steps, seconds, 0, 0.0))
    result = replace(summary({"plain": plain, "sequoia": ours})["sequoia"], prediction=MIXTURE)
    return predicted_by_kind(result, KINDS_PLAN, kinds, ours, plain)
