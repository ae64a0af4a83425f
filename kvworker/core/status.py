"""What a person sees of the core: plain data for the ``Status`` message."""

import msgspec

from kvcommon.messages import StoreState
from kvworker.core.engines import Engine
from kvworker.core.parts import Parts

Row = dict[str, str | int | float | bool]
#: Ended jobs shown.
_RECENT = 32
_TOTALS = tuple(f"{kind}_{what}" for kind in ("save", "load") for what in ("jobs", "blocks"))


class CoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``Status`` that the core knows, under the same names."""

    store_state: StoreState
    engines: tuple[Row, ...]
    recent: tuple[Row, ...]
    metrics: dict[str, float]


def show(parts: Parts) -> CoreStatus:
    """Return the state as of the last event."""
    return CoreStatus(
        store_state=parts.breaker.state,
        engines=tuple(_engine(parts, engine) for engine in parts.engines),
        recent=_recent(parts),
        metrics=_metrics(parts),
    )


def _engine(parts: Parts, engine: Engine) -> Row:
    row: Row = {
        "engine": engine.key,
        "state": engine.state.value,
        "scheduler": bool(engine.scheduler_epoch),
        "model": engine.attach.namespace.model if engine.attach else "",
        "fingerprint": engine.mark,
        "step": engine.progress.begun,
        "open_saves": sum(len(batch.jobs) for batch in parts.saves.of(engine)),
        "open_loads": sum(len(batch.jobs) for batch in parts.loads.of(engine)),
    }
    for column in (*_TOTALS, "save_bytes", "load_bytes"):
        row[column] = engine.totals.get(column, 0)
    return row


def _recent(parts: Parts) -> tuple[Row, ...]:
    rows: list[Row] = []
    for key in reversed(parts.book.ended):
        if len(rows) == _RECENT:
            break
        job = parts.book.ended[key]
        rows.append(
            {
                "engine": key.engine,
                "job": key.job_id,
                "kind": job.kind,
                "request": job.request_id,
                "step": job.step,
                "outcome": job.end.outcome.value,
                "reason": job.end.reason,
                "blocks": job.num_blocks,
                "failed_blocks": len(job.end.failed_blocks),
                "bytes": job.end.num_bytes,
                "duration_us": job.end.duration_us,
                "age_s": round((parts.kernel.now_ns - job.ended_ns) / 1e9, 3),
            }
        )
    return tuple(rows)


def _metrics(parts: Parts) -> dict[str, float]:
    attached = sum(engine.attached for engine in parts.engines)
    return {
        **parts.kernel.counters,
        "kvferry_engines_attached": attached,
        "kvferry_jobs_open": len(parts.book.open),
        "kvferry_lookups_open": len(parts.lookups.open),
        "kvferry_operations_open": len(parts.kernel.operations),
        "kvferry_puts_open": len(parts.saves.writers),
        "kvferry_gets_open": sum(parts.loads.references.values()),
        "kvferry_store_up": 0 if parts.breaker.down else 1,
    }
