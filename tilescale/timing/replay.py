# SPDX-License-Identifier: MIT
"""Discrete-event simulation: recorded tasks run again, over resources that take time.

The order of visible effects may differ from the recorded run: a wait ends when its value has come in simulated time,
programs start when others have ended in simulated time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from tilescale.collectives.links import SharedLink
from tilescale.errors import Location
from tilescale.timing.grids import SimulatedGrid
from tilescale.timing.live import PublicationPoint, RunningTask
from tilescale.timing.lockstep import in_lockstep
from tilescale.timing.no_gc import no_cyclic_collection
from tilescale.timing.sharing import Action, EventQueue, SharedResource
from tilescale.timing.steps import (
    AcquireStep,
    ForkStep,
    LaunchStep,
    Place,
    PublishStep,
    RecordedTask,
    RendezvousStep,
    SettleStep,
    UnitResource,
    WorkStep,
)
from tilescale.timing.timeline import Copies, Span, Timeline, Use


class Simulation:
    """One simulation.

    Args:
        level: name of the level that owns tensors.
        program: name of the level that runs programs, and `places`, how many of it one owner of tensors has.
        kinds: resource name -> "compute" or "memory".
        values: what places hold at first.
    """

    def __init__(
        self, level: str, program: str, places: int, kinds: Mapping[str, str], values: Mapping[Hashable, Any] = {}
    ):
        self.level, self.program, self.places, self.kinds, self.values = level, program, places, kinds, values
        self.events = EventQueue()
        self.spans: list[Span] = []
        self._servers: dict[Hashable, SharedResource] = {}
        self._channels: dict[Hashable, PublicationPoint] = {}
        self._rendezvous: dict[Hashable, list[tuple[int, RunningTask]]] = {}
        self._running = 0
        self._end_s = 0.0
        # How many units one is simulated for.
        self._units = 1

    def run(self, tasks: Sequence[RecordedTask], engines: Sequence[RecordedTask] = ()) -> Timeline:
        """Simulate tasks that start together, and all that they start. Raises RuntimeError: tasks wait for what no
        recorded task does.

        Args:
            tasks: of the tensor-owning units.
            engines: tasks of their engines.
        """
        if not engines and in_lockstep(tasks):
            self._units = len(tasks)
        with no_cyclic_collection():
            for task in (*(tasks if self._units == 1 else tasks[:1]), *engines):
                self._begin(RunningTask(task, None, None, task.engine or self.level, self._land_alone))
            self.events.run()
        if self._running:
            raise RuntimeError(f"the simulation stopped with {self._running} tasks that wait")
        end = max([self._end_s, *(span.end_s for span in self.spans)])
        spans: Sequence[Span] = tuple(self.spans)
        if self._units > 1:
            spans = Copies(spans, [task.unit for task in tasks])
        return Timeline(self.level, spans, tuple(self._uses()), end)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _begin(self, live: RunningTask) -> None:
        self._running += 1
        live.visible_s = self.events.now
        self.go_on(live)

    def go_on(self, live: RunningTask) -> None:
        """Take steps until one takes time."""
        steps = live.task.steps
        while live.at < len(steps):
            step = steps[live.at]
            live.at += 1
            if not _STEPS[type(step)](self, live, step):
                return
        if live.ahead:
            self._settle(live, SettleStep())
            return
        self._running -= 1
        self._end_s = max(self._end_s, live.visible_s)
        live.ended(live)

    def _span(
        self, live: RunningTask, name: str, kind: str, begin: float, where: Location | None, cause: int | None
    ) -> int:
        return self._noted(live, live.engine, name, kind, begin, self.events.now, where, cause)

    def _noted(
        self, live: RunningTask, engine: str, name: str, kind: str, begin: float, end: float, where: Location | None,
        cause: int | None, nbytes: float = 0, flops: float = 0,
    ) -> int:  # fmt: skip
        span = Span(live.row, engine, live.unit, name, kind, begin, end, round(nbytes), round(flops), where, cause)
        self.spans.append(span)
        return (len(self.spans) - 1) * self._units

    # -- work ----------------------------------------------------------------------------------------------------------

    def _work(self, live: RunningTask, step: WorkStep) -> bool:
        if step.ahead is None:

            def done(last: int) -> None:
                live.last = last
                self.go_on(live)

            self._perform(live, step, done)
            return False
        token = object()
        live.ahead.add(token)

        def landed(last: int) -> None:
            live.ahead.discard(token)
            self._release(live, token)
            if live.waits is not None and len(live.ahead) <= live.waits:
                live.waits, live.last = None, last
                if self.events.now > live.since:
                    where = step.parts[0].where
                    self._span(live, f"wait for {step.parts[0].name}", "wait", live.since, where, last)
                self.go_on(live)

        self._perform(live, step, landed, " ahead")
        return self._settle(live, SettleStep(step.ahead))

    def _settle(self, live: RunningTask, step: SettleStep) -> bool:
        if len(live.ahead) <= step.left:
            return True
        live.waits, live.since = step.left, self.events.now
        return False

    def _perform(self, live: RunningTask, step: WorkStep, done: Callable[[int], None], suffix: str = "") -> None:
        """Do the work of a task; `done` gets the span that ended last."""
        begin, cause = self.events.now, live.last

        def over(ends: list[float]) -> None:
            live.visible_s = max(live.visible_s, self.events.now + step.tail_s)
            done(self._performed(live, step, begin, ends, cause, suffix))

        self._serve_demands(live, step, over)

    def _serve_demands(self, live: RunningTask, step: WorkStep, over: Callable[[list[float]], None]) -> None:
        """Serve all demands concurrently; `over` gets the end time of each part."""
        ends = [self.events.now] * len(step.parts)
        open_ = 1
        for part in step.parts:
            open_ += len(part.demands)

        def served(index: int | None) -> None:
            nonlocal open_
            if index is not None:
                ends[index] = self.events.now
            open_ -= 1
            if not open_:
                over(ends)

        # A unit that owns tensors, or a separate engine, keeps as much in flight as all its programs together.
        weight = self.places if live.place is None else 1
        self.events.at(self.events.now + step.floor_s, lambda: served(None))
        for index, part in enumerate(step.parts):
            for resource, seconds in part.demands.items():
                self._server(live, resource).serve(seconds, partial(served, index), weight)

    def _performed(
        self, live: RunningTask, step: WorkStep, begin: float, ends: list[float], cause: int | None, suffix: str
    ) -> int:
        """The spans of a step's parts; returns the slowest one's. The slowest part and computation last until the
        step's end, overlapped parts until their own."""
        parts, now, engine = step.parts, self.events.now, live.engine + suffix
        main = len(parts) - 1
        for i, part in enumerate(parts):
            if part.kind == "compute":
                main = i
                break
        slowest = main if ends[main] == now else ends.index(now) if now in ends else 0
        last = 0
        for i in (*range(main), *range(main + 1, len(parts)), main):
            part = parts[i]
            lane = engine if i == main else f"{engine} {part.kind}"
            end = now if i == main or i == slowest else ends[i]
            span = self._noted(
                live, lane, part.name, part.kind, begin, end, part.where, cause, part.nbytes, part.flops
            )
            last = span if i == slowest else last
        return last

    def _server(self, live: RunningTask, resource: Hashable) -> SharedResource:
        key = resource
        if isinstance(resource, str):
            key = live.place, resource
        elif isinstance(resource, UnitResource) and resource.row is None:
            key = UnitResource(live.row, resource.name)
        server = self._servers.get(key)
        if server is None:
            server = self._servers[key] = SharedResource(self.events)
        return server

    def land(self, live: RunningTask, then: Action) -> None:
        """Continue when all writes of a task are visible to others."""
        begin = self.events.now

        def landed() -> None:
            if self.events.now > begin:
                live.last = self._span(live, "writes land", "sync", begin, None, live.last)
            then()

        self.events.at(max(begin, live.visible_s), landed)

    def _land_alone(self, live: RunningTask) -> None:
        self.land(live, lambda: None)

    # -- flags and barriers --------------------------------------------------------------------------------------------

    def _channel(self, live: RunningTask, place: Place) -> PublicationPoint:
        key = _found(live, place)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = PublicationPoint(self.values.get(place))
        return channel

    def _publish(self, live: RunningTask, step: PublishStep) -> bool:
        """Publish at a place, without blocking the task. Copies that run ahead have to land first."""
        if live.ahead:
            live.held.append((set(live.ahead), step))
        else:
            self._show(live, step)
        return True

    def _release(self, live: RunningTask, landed: object) -> None:
        """Publish what waited for a work that has landed, and for no other."""
        for tokens, step in live.held:
            tokens.discard(landed)
            if not tokens:
                self._show(live, step)
        live.held = [(tokens, step) for tokens, step in live.held if tokens]

    def _show(self, live: RunningTask, step: PublishStep) -> None:
        begin, due = self.events.now, max(self.events.now, live.visible_s) + step.delay_s
        channel = self._channel(live, step.place)

        def shown() -> None:
            channel.count += 1
            channel.shown_s = self.events.now
            if step.change is not None:
                channel.value = step.change(channel.value)
            channel.last = cause
            if due > begin:
                channel.last = self._noted(
                    live, f"{live.engine} signals", step.name, "sync", begin, self.events.now, step.where, cause
                )
            self._wake(channel)

        cause = live.last
        if due > begin:
            self.events.at(due, shown)
        else:
            shown()

    def _wake(self, channel: PublicationPoint) -> None:
        over = [(live, step) for live, step in channel.waiting if channel.open_to(step)]
        if over:
            channel.waiting = [(live, step) for live, step in channel.waiting if not channel.open_to(step)]
        for live, step in over:
            if self.events.now > live.since:
                if not step.idle:
                    self._span(live, step.name, "wait", live.since, step.where, channel.last)
                live.last = channel.last
            self._acquired(live, step, self._left(channel, step))

    def _acquire(self, live: RunningTask, step: AcquireStep) -> bool:
        channel = self._channel(live, step.place)
        if not channel.open_to(step):
            live.since = self.events.now
            channel.waiting.append((live, step))
            return False
        left = self._left(channel, step)
        if not left:
            return True
        self._acquired(live, step, left)
        return False

    def _left(self, channel: PublicationPoint, step: AcquireStep) -> float:
        """Seconds that a wait takes once it may end."""
        return max(step.delay_s, channel.shown_s + step.lag_s - self.events.now)

    def _acquired(self, live: RunningTask, step: AcquireStep, left: float) -> None:
        if not left:
            # Deferred: tasks that came with this task are woken first.
            self.events.at(self.events.now, lambda: self.go_on(live))
            return
        begin = self.events.now

        def done() -> None:
            live.last = self._span(live, step.name, "sync", begin, step.where, live.last)
            self.go_on(live)

        self.events.at(begin + left, done)

    # -- rendezvous ----------------------------------------------------------------------------------------------------

    def _join(self, live: RunningTask, step: RendezvousStep) -> bool:
        self.land(live, lambda: self._arrive(live, step))
        return False

    def _arrive(self, live: RunningTask, step: RendezvousStep) -> None:
        live.since = self.events.now
        key = _found(live, step.place)
        members = self._rendezvous.setdefault(key, [])
        members.append((step.rank, live))
        # One unit represents all: it synchronizes with its replicas.
        alike = self._units > 1 and key is step.place
        if len(members) < step.size and not alike:
            return
        del self._rendezvous[key]
        begin, cause = self.events.now, live.last
        present = [member for _, member in sorted(members, key=lambda member: member[0])]
        work = step.work(tuple(range(self._units)) if alike else tuple(member.row for member in present))
        part = work.parts[0]

        def over(_: list[float]) -> None:
            for member in present:
                if begin > member.since:
                    self._noted(member, member.engine, step.name, "wait", member.since, begin, step.where, cause)
                member.last = self._noted(
                    member, member.engine, part.name, part.kind, begin, self.events.now, step.where, cause,
                    part.nbytes, part.flops,
                )  # fmt: skip
            for member in present:
                self.go_on(member)

        self._serve_demands(live, work, over)

    # -- tasks that start tasks ----------------------------------------------------------------------------------------

    def _fork(self, live: RunningTask, step: ForkStep) -> bool:
        left = len(step.tasks)
        if not left:
            return True
        begin = self.events.now

        def ended(child: RunningTask) -> None:
            nonlocal left
            left -= 1
            live.visible_s = max(live.visible_s, child.visible_s)
            if not left:
                live.last = child.last if self.events.now > begin else live.last
                self.go_on(live)

        for number, task in enumerate(step.tasks):
            self._begin(RunningTask(task, live, live.place, f"{live.engine}/{number}", ended))
        return False

    def start(
        self,
        task: RecordedTask,
        parent: RunningTask,
        place: int,
        engine: str,
        ended: Callable[[RunningTask], None],
        alone: bool,
    ) -> None:
        """Start a program that a task launched; it is `alone` if all places that it names are its own."""
        child = RunningTask(task, parent, (parent.row, place), engine, ended)
        if alone:
            child.scope = object()
        self._begin(child)

    def _launch(self, live: RunningTask, step: LaunchStep) -> bool:
        def start(begin: float) -> None:
            if step.seconds:
                live.last = self._span(live, step.name, "launch", begin, step.where, live.last)
            SimulatedGrid(self, live, step).fill()

        def landed() -> None:
            begin = self.events.now
            self.events.at(begin + step.seconds, lambda: start(begin))

        self.land(live, landed)
        return False

    # -- the result ----------------------------------------------------------------------------------------------------

    def _uses(self) -> list[Use]:
        total: dict[tuple[str, str, str], float] = {}
        for key, server in self._servers.items():
            if isinstance(key, SharedLink):
                total[str(key), key.network, "network"] = server.busy_s
                continue
            if isinstance(key, UnitResource):
                first, name, share = key.row or 0, key.name, 1
            else:
                assert isinstance(key, tuple)
                (first, _), name, share = *key, self.places
            if first and self._units > 1:
                continue  # the first unit represents this one
            for row in range(first, first + self._units):
                label = f"{self.level} {row}", name, self.kinds.get(name, "network")
                total[label] = total.get(label, 0.0) + server.busy_s / share
        return [Use(unit, name, busy, kind) for (unit, name, kind), busy in total.items()]


def _found(live: RunningTask, place: Place) -> Hashable:
    """A place that a task names, independent of the task."""
    return (live.scope, place) if isinstance(place, int) else place


_STEPS: dict[type, Callable[[Simulation, RunningTask, Any], bool]] = {
    WorkStep: Simulation._work,
    SettleStep: Simulation._settle,
    PublishStep: Simulation._publish,
    AcquireStep: Simulation._acquire,
    RendezvousStep: Simulation._join,
    ForkStep: Simulation._fork,
    LaunchStep: Simulation._launch,
}
"""Handler of each kind of step; returns whether the task continues at once."""
