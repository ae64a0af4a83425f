"""Events, commands and messages in plain words, one line each."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from kvcommon import messages as msg
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome

#: Ids and names are cut at this length in a line.
_MAX_TEXT: Final = 60
_MAX_SPANS: Final = 6

_Say = Callable[[Any], str]


def blocks(ids: Sequence[int]) -> str:
    """Return "3 blocks (4-6)"."""
    return f"{count(len(ids), 'block')} ({spans(ids)})" if ids else "0 blocks"


def spans(ids: Iterable[int]) -> str:
    """Write numbers with runs drawn together: ``3-7, 9``."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:_MAX_SPANS]]
    return ", ".join([*texts, "…"] if len(runs) > _MAX_SPANS else texts)


def on_ranks(ids: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0-2"."""
    return f"{'rank' if len(ids) == 1 else 'ranks'} {spans(ids)}"


def count(number: int, noun: str) -> str:
    """Write a number with its noun: "1 block", "2 blocks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(num_bytes: int) -> str:
    """Write a number of bytes for people."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def millis(nanoseconds: int) -> str:
    """Write a duration in milliseconds."""
    return f"{nanoseconds / 1e6:.3f} ms"


def event_text(event: msgspec.Struct | None) -> str:
    """Say what happened."""
    if event is None:
        return "something that this version cannot read"
    return _say(_EVENTS, event)


def command_text(command: msgspec.Struct) -> str:
    """Say what the core answered."""
    return _say(_COMMANDS, command)


def outcomes(found: Sequence[Outcome]) -> str:
    """Count outcomes: "3 ok, 1 miss"."""
    tally: dict[str, int] = {}
    for outcome in found:
        tally[outcome.value] = tally.get(outcome.value, 0) + 1
    return ", ".join(f"{number} {name}" for name, number in tally.items()) or "no keys"


def _say(table: dict[type, _Say], value: msgspec.Struct) -> str:
    say = table.get(type(value))
    return type(value).__name__ if say is None else say(value)


def _cut(text: str) -> str:
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def engine_name(key: str) -> str:
    """Shorten an engine key as logs' names do: ``03621f4b#0``."""
    engine, _, rank = key.rpartition("#")
    return f"{_cut(engine[:8])}#{_cut(rank)}"


def _why(reason: str) -> str:
    return f" ({_cut(reason)})" if reason else ""


def _end(end: msg.JobEnd) -> str:
    text = f"job {end.job_id} {end.outcome.value}"
    if end.failed_blocks:
        text += f" for {blocks(end.failed_blocks)}"
    if end.num_bytes:
        text += f", {size(end.num_bytes)} in {end.duration_us / 1000:.3f} ms"
    return text + _why(end.reason)


def _ends(ends: Sequence[msg.JobEnd]) -> str:
    return "; ".join(_end(end) for end in ends)


def _plan(plan: msg.StepPlan) -> str:
    jobs = [
        f"load {job.job_id} of {blocks(job.block_ids)}"
        f"{' layerwise' if job.layerwise else ' asynchronously'}"
        for job in plan.loads
    ]
    jobs += [f"save {job.job_id} of {blocks(job.block_ids)}" for job in plan.saves]
    return f"the plan of step {plan.step}: {'; '.join(jobs) or 'nothing'}"


def _lookup(lookup: msg.Lookup) -> str:
    total = sum(len(group.block_hashes) for group in lookup.groups)
    return f"lookup {lookup.lookup_id} of {count(total, 'block')} for {_cut(lookup.request_id)}"


def _result(result: msg.LookupResult) -> str:
    hits = ", ".join(str(hit.num_blocks) for hit in result.hits) or "0"
    return f"lookup {result.lookup_id}: {hits} blocks stored{_why(result.reason)}"


def _verdict(verdict: msg.StepVerdict) -> str:
    tainted = f"all but tainted jobs {spans(verdict.tainted)}" if verdict.tainted else "its saves"
    return f"the verdict on step {verdict.step}: publish {tainted}"


def _answer(answer: sched_do.AnswerMatch) -> str:
    if answer.num_tokens is None:
        return f"answers vLLM: ask again{_why(answer.reason)}"
    how = ", asynchronously" if answer.asynchronous else ""
    return f"answers vLLM: {count(answer.num_tokens, 'token')} to load{how}{_why(answer.reason)}"


def _scheduled(event: sched.StepScheduled) -> str:
    names = ", ".join(
        f"{_cut(one.request_id)} ({one.num_computed_tokens}+{one.num_scheduled_tokens} tokens)"
        for one in event.requests[:_MAX_SPANS]
    )
    more = ", …" if len(event.requests) > _MAX_SPANS else ""
    lost = f"; preempted: {', '.join(map(_cut, event.preempted))}" if event.preempted else ""
    return f"vLLM scheduled step {event.step}: {names or 'no request'}{more}{lost}"


def _finished(event: sched.StepFinished) -> str:
    failed = event.invalid_block_ids
    bad = f"; the load of {blocks(failed)} failed" if failed else ""
    return f"vLLM finished step {event.step}{bad}"


def _layers(first: int, end: int) -> str:
    return f"layer {first}" if end == first + 1 else f"layers {first}-{end - 1}"


def _keys(command: Any) -> str:  # noqa: ANN401 - any command with keys
    return count(len(command.keys), "object")


_BODIES: Final[dict[type, _Say]] = {
    msg.Attach: lambda m: f"attach {m.device}, process {m.pid}",
    msg.Detach: lambda m: f"detach{_why(m.reason)}",
    msg.StepBegun: lambda m: f"step {m.step} has begun",
    msg.LayersComputed: lambda m: f"{count(m.num_layers, 'layer')} of step {m.step} computed",
    msg.CancelJobs: lambda m: f"cancel jobs {spans(m.job_ids)}",
    msg.Heartbeat: lambda _: "heartbeat",
    msg.Hello: lambda m: f"hello, {count(len(m.ranks), 'rank')}",
    msg.Lookup: _lookup,
    msg.StepPlan: _plan,
    msg.StepVerdict: _verdict,
    msg.ReleaseLookup: lambda m: f"lookup {m.lookup_id} is not needed any more",
    msg.ResetStore: lambda _: "forget what is stored",
    msg.Attached: lambda m: f"attached, process {m.pid}",
    msg.Refused: lambda m: f"refused{_why(m.reason)}",
    msg.JobsEnded: lambda m: _ends(m.ends),
    msg.Welcome: lambda m: f"welcome, {'attached' if m.attached else 'not attached'}",
    msg.LookupResult: _result,
    msg.PlanAck: lambda m: f"the plan of step {m.step} is taken in",
    msg.StoreHealth: lambda m: f"the store is {m.state.value}{_why(m.reason)}",
}


def body_text(body: msgspec.Struct) -> str:
    """Say what a message says."""
    return _say(_BODIES, body)


_EVENTS: Final[dict[type, _Say]] = {
    sched.Ticked: lambda e: (
        f"time passed; nothing heard of rank {spans(rank for rank, _ in e.silent_ms)}"
        if e.silent_ms
        else "time passed"
    ),
    sched.RanksKnown: lambda e: f"vLLM named {count(len(e.ranks), 'rank')}",
    sched.DaemonReady: lambda e: (
        f"daemon of rank {e.rank} is ready, {'attached' if e.attached else 'not attached'}"
    ),
    sched.DaemonLost: lambda e: (
        f"daemon of rank {e.rank} is {'dead' if e.dead else 'out of reach'}{_why(e.reason)}"
    ),
    sched.FenceFailed: lambda e: f"the daemon of rank {e.rank} cannot be killed{_why(e.reason)}",
    sched.StoreChanged: lambda e: (
        f"rank {e.rank}: the store is {'up' if e.up else 'down'}{_why(e.reason)}"
    ),
    sched.RequestAdded: lambda e: (
        f"vLLM took in {_cut(e.request_id)}: {count(e.num_tokens, 'token')}, "
        f"{count(len(e.block_hashes), 'full block')}"
    ),
    sched.MatchAsked: lambda e: (
        f"vLLM asks what can be loaded for {_cut(e.request_id)} "
        f"(has {e.num_local_tokens} of {e.num_tokens} tokens)"
    ),
    sched.BlocksAllocated: lambda e: (
        f"vLLM gave {_cut(e.request_id)} {blocks(e.block_ids)}, "
        f"{count(e.num_external_tokens, 'token')} of them to load"
    ),
    sched.StepScheduled: _scheduled,
    sched.StepFinished: _finished,
    sched.RequestFinished: lambda e: f"{_cut(e.request_id)} finished",
    sched.LookupAnswered: lambda e: f"rank {e.rank} answered {_result(e.result)}",
    sched.PlanAcked: lambda e: f"rank {e.rank} took in the plan of step {e.step}",
    sched.JobsReported: lambda e: f"rank {e.rank} reports {_ends(e.ends)}",
    sched.ResetAsked: lambda _: "vLLM asks to forget what is stored",
    work.Ticked: lambda _: "time passed",
    work.ModelSaid: lambda e: (
        f"the model side of {engine_name(e.engine)} says: {body_text(e.body)}"
    ),
    work.SchedulerSaid: lambda e: (
        f"the scheduler side of {engine_name(e.engine)} sends {body_text(e.body)}"
    ),
    work.PeerLost: lambda e: f"{e.role} side of {engine_name(e.engine)} is gone{_why(e.reason)}",
    work.EngineMapped: lambda e: (
        f"op {e.op}: memory of {engine_name(e.engine)} "
        + (f"cannot be mapped{_why(e.error)}" if e.error else "is mapped")
    ),
    work.EngineUnmapped: lambda e: f"op {e.op}: memory of {engine_name(e.engine)} is let go",
    work.KeysFound: lambda e: f"op {e.op}: keys looked for: {outcomes(e.outcomes)}",
    work.PutsOpened: lambda e: f"op {e.op}: put sessions opened: {outcomes(e.outcomes)}",
    work.LayersWritten: lambda e: (
        f"op {e.op}: layers written: {outcomes(e.outcomes)}, {size(sum(e.num_bytes))}"
    ),
    work.PutsClosed: lambda e: (
        f"op {e.op}: published: {outcomes(e.ended)}; discarded: {outcomes(e.revoked)}"
    ),
    work.GetsOpened: lambda e: f"op {e.op}: get sessions opened: {outcomes(e.outcomes)}",
    work.LayersLoaded: lambda e: (
        f"op {e.op}: layers loaded: {outcomes(e.outcomes)}, {size(e.num_bytes)}"
    ),
    work.GetsClosed: lambda e: f"op {e.op}: get sessions closed",
    work.StoreReset: lambda e: f"op {e.op}: {count(e.num_removed, 'object')} removed",
    work.StoreProbed: lambda e: f"op {e.op}: the store is {e.state.value}{_why(e.reason)}",
}
_COMMANDS: Final[dict[type, _Say]] = {
    sched_do.SendToDaemon: lambda c: f"tells rank {c.rank}: {body_text(c.body)}",
    sched_do.AnswerMatch: _answer,
    sched_do.HoldBlocks: lambda c: f"holds {blocks(c.block_ids)} for job {c.job_id}",
    sched_do.FreeBlocks: lambda c: f"gives back {blocks(c.block_ids)} of job {c.job_id}",
    sched_do.TellModel: lambda c: (
        f"tells the model side: step {c.step}, {count(len(c.loads), 'load')}"
        f"{', saves' if c.saves else ''}{', gives up ' + spans(c.cancel) if c.cancel else ''}"
    ),
    sched_do.FenceDaemon: lambda c: f"kills the daemon of rank {c.rank}, which is silent",
    work_do.SendToModel: lambda c: f"tells the model side: {body_text(c.body)}",
    work_do.SendToScheduler: lambda c: f"tells the scheduler side: {body_text(c.body)}",
    work_do.MapEngine: lambda c: f"op {c.op}: map the memory of {engine_name(c.engine)}",
    work_do.UnmapEngine: lambda c: f"op {c.op}: let go of the memory of {engine_name(c.engine)}",
    work_do.FindKeys: lambda c: f"op {c.op}: look for {_keys(c)}",
    work_do.OpenPuts: lambda c: f"op {c.op}: open put sessions for {_keys(c)} of step {c.step}",
    work_do.WriteLayers: lambda c: (
        f"op {c.op}: write {_layers(c.first_layer, c.end_layer)} of {blocks(c.block_ids)}"
    ),
    work_do.ClosePuts: lambda c: (
        f"op {c.op}: publish {count(len(c.end), 'object')}, "
        f"discard {count(len(c.revoke), 'object')} of step {c.step}"
    ),
    work_do.OpenGets: lambda c: f"op {c.op}: open get sessions for {_keys(c)} of step {c.step}",
    work_do.LoadLayers: lambda c: (
        f"op {c.op}: load {_layers(c.first_layer, c.end_layer)} into {blocks(c.block_ids)}"
    ),
    work_do.CloseGets: lambda c: f"op {c.op}: close get sessions of {_keys(c)}",
    work_do.PublishProgress: lambda c: (
        f"progress page: step {c.step}, {count(c.num_layers, 'layer')}"
        f"{', failed' if c.failed else ''}"
    ),
    work_do.Cancel: lambda c: f"cancel op {c.op}",
    work_do.ResetNamespace: lambda c: f"op {c.op}: forget {count(len(c.prefixes), 'namespace')}",
    work_do.ProbeStore: lambda c: f"op {c.op}: probe the store",
}
