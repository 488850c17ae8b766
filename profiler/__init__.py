"""Models on this machine -> profile: acceptance, latency, hardware."""

from sequoia_plan.profiler.measure import measure

__all__ = ["measure"]
