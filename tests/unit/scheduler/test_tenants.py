"""Which tenant is next in a pool: requests carry theirs to the policy."""

from __future__ import annotations

from greenroom.core.generation import SamplingParams
from greenroom.core.messages import Request, Task
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.effects import Run
from tests.unit.protocol.pool_bench import DONE, Bench


def test_one_tenant_s_flood_does_not_keep_another_waiting() -> None:
    """Two places; ann sends six at once, then bob one. His is next when a place is free, and hers go on in order."""
    bench = Bench(PoolConfig(max_waiting=100))
    bench.worker(max_running=2)
    for name in ("ann0", "ann1", "ann2", "ann3", "ann4", "ann5", "bob0"):
        request = Request(
            request_id=name,
            pool=0,
            model="m",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=2),
            accepted_ms=int(bench.now),
            deadline_ms=int(bench.now + 60_000),
            tenant=name[:3],
        )
        bench.record(Task(request=request, task_type="t"))
    begun = [effect for effect in bench.wanted if isinstance(effect, Run)]
    assert [run.task.request.request_id for run in begun] == ["ann0", "ann1"]
    order: list[str] = []
    while len(order) < 4:
        run = begun.pop(0)
        bench.wanted.clear()
        bench.do(bench.pool.result("w", run.task.request.request_id, run.attempt, DONE, bench.now))
        bench.land()
        [more] = [effect for effect in bench.wanted if isinstance(effect, Run)]
        order.append(more.task.request.request_id)
        begun.append(more)
    assert order == ["bob0", "ann2", "ann3", "ann4"]
