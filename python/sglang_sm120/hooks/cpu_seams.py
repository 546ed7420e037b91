"""The packed broadcast on the CPU platform, whose sampler is this package's own."""

from __future__ import annotations

from sglang_sm120.hooks.contract import Part
from sglang_sm120.hooks.seams import BROADCAST, sampler

PART = Part("cpu_seams", (sampler("sglang_sm120.sim.sampling.sample_tree"), BROADCAST))
