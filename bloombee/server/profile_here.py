"""The profile of this machine by itself, without a swarm."""

from __future__ import annotations

from functools import partial

import torch

from bloombee.config.settings import ServerSettings
from bloombee.core import Span
from bloombee.kv import make_pool
from bloombee.models import SpanModel, open_source
from bloombee.server.background import in_background
from bloombee.server.executor import Executor, ExecutorSettings
from bloombee.server.opened import Opened, open_model
from bloombee.server.profile import Profile, profiling

USUAL_BLOCKS = 8
STOP_S = 5.0


async def profile_here(settings: ServerSettings) -> tuple[Span, Profile]:
    """Load a span, the last few blocks unless one is asked for, and measure it.

    Raises SettingsError and ModelError for what the user can mend.
    """
    if settings.blocks is None:
        count = (await in_background(partial(open_source, settings.model))).num_blocks
        blocks = Span(max(0, count - USUAL_BLOCKS), count)
        settings = settings.model_copy(update={"blocks": blocks})
    span = settings.blocks or Span(0, 1)
    opened = (await in_background(partial(open_model, settings))).settled(settings, span)
    model = await in_background(partial(_load, opened, span))
    shape = opened.source.kv_shape(span, opened.dtype, opened.device)
    pool = make_pool(shape, opened.memory.kv_tokens, max_length=opened.max_length)
    threads = torch.get_num_threads() if settings.threads == "auto" else settings.threads
    executor = Executor(
        model, pool, ExecutorSettings(threads=threads, pass_tokens=settings.max_step_tokens)
    )
    executor.start()
    try:
        return span, await profiling(settings, opened, threads)(executor, model, pool)
    finally:
        await executor.stop(STOP_S)


def _load(opened: Opened, span: Span) -> SpanModel:
    return SpanModel.load_with_ends(opened.source, span, dtype=opened.dtype, device=opened.device)
