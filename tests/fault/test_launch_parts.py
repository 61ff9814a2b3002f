"""The parts of a launch by themselves: shares, agreement between ranks, CPUs near a rank, and what is said of failures."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from tieroff.core.machine import Machine
from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Trace
from tieroff.errors import ConfigError, StateError
from tieroff.launch.folder import ACCOUNT_FILE, ERROR_FILE, STDERR_FILE, rank_folder, read_json, write_json
from tieroff.launch.summary import as_document, as_lines, first_cause, summarize
from tieroff.runtime.step.communication import OVER, Kind, with_communication
from tieroff.session.rank_budget import RankBudget
from tieroff.session.ranks import Agreement, Ranks

MACHINE = Machine(
    name="box",
    device_bytes=100,
    host_bytes=100,
    nvme_bytes=100,
    d2h_bytes_per_s=1000,
    h2d_bytes_per_s=900,
    nvme_write_bytes_per_s=300,
    nvme_read_bytes_per_s=601,
    cpu_update_bytes_per_s=600,
    host_memory_bytes_per_s=3000,
    dirs={"/d": {"write_bytes_per_s": 300}},
)


class Failed:
    """A failure as the agent tells of it."""

    def __init__(self, exitcode: int, timestamp: int = 0) -> None:
        self.exitcode, self.timestamp = exitcode, timestamp


# -- shares --------------------------------------------------------------------------------------------------------------


def test_a_process_that_nobody_launched_is_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = Ranks.here()
    assert alone == Ranks(0, 1, 0, 1)
    assert alone.share_bytes(7) == 7
    assert alone.share_machine(MACHINE, "cpu") is MACHINE


def test_ranks_are_those_that_torchrun_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert Ranks.here() == Ranks(5, 8, 1, 4)


@pytest.mark.parametrize(("name", "value"), [("RANK", "first"), ("RANK", "-1"), ("LOCAL_WORLD_SIZE", "0"), ("WORLD_SIZE", "")])
def test_a_rank_that_cannot_be_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}.*got '{value}'"):
        Ranks.here()


def test_a_gpu_shares_the_drives_and_a_cpu_memory_too() -> None:
    ranks = Ranks(0, 3, 0, 3)
    on_gpu = ranks.share_machine(MACHINE, "cuda")
    assert (on_gpu.d2h_bytes_per_s, on_gpu.h2d_bytes_per_s) == (1000, 900)
    assert (on_gpu.nvme_write_bytes_per_s, on_gpu.nvme_read_bytes_per_s) == (100, 200)
    assert (on_gpu.cpu_update_bytes_per_s, on_gpu.host_memory_bytes_per_s) == (200, 1000)
    on_cpu = ranks.share_machine(MACHINE, "cpu")
    assert (on_cpu.d2h_bytes_per_s, on_cpu.h2d_bytes_per_s) == (333, 300)
    assert on_cpu.dirs == MACHINE.dirs


def test_a_link_that_is_not_there_stays_away_and_a_slow_one_stays() -> None:
    shared = Ranks(0, 8, 0, 8).share_machine(Machine(nvme_write_bytes_per_s=3, nvme_read_bytes_per_s=0), "cpu")
    assert (shared.nvme_write_bytes_per_s, shared.nvme_read_bytes_per_s, shared.d2h_bytes_per_s) == (1, 0, 0)


@given(st.integers(0, 1 << 50), st.integers(1, 64))
def test_shares_never_come_to_more_than_there_is(size_bytes: int, count: int) -> None:
    shares = [Ranks(rank, count, rank, count).share_bytes(size_bytes) for rank in range(count)]
    assert 0 <= size_bytes - sum(shares) < count
    assert len(set(shares)) == 1


# -- agreement -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), min_size=1, max_size=5))
def test_all_ranks_agree_on_the_least_budget_and_the_largest_need(told: list[tuple[int, int]]) -> None:
    store = dist.HashStore()
    ranks = [Agreement(store, rank, len(told), wait_s=5) for rank in range(len(told))]
    for agreement, (budget, floor) in zip(ranks, told, strict=True):
        agreement.publish(budget, floor)
    found = [agreement.settle() for agreement in ranks]
    assert len({(a.budget, a.floor) for a in found if a is not None}) == 1
    assert found[0] is not None
    assert found[0].budget.budget_bytes == min(budget for budget, _ in told)
    assert found[0].floor.floor_bytes == max(floor for _, floor in told)
    assert told[found[0].floor.rank][1] == found[0].floor.floor_bytes


def test_a_rank_waits_for_one_that_has_not_told_yet() -> None:
    store = dist.HashStore()
    first, second = Agreement(store, 0, 2), Agreement(store, 1, 2)
    first.publish(10, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.settle)
        assert not waiting.done()
        second.publish(8, 3)
        found = waiting.result(30)
    assert found is not None
    assert (found.budget.rank, found.budget.budget_bytes, found.floor.rank) == (1, 8, 1)
    assert found == second.settle()


def test_a_rank_that_never_trains_is_not_waited_for() -> None:
    alone = Agreement(dist.HashStore(), 1, 4, wait_s=0)
    alone.publish(10, 2)
    found = alone.settle()
    assert found is not None
    assert (found.budget.rank, found.budget.budget_bytes, found.floor.floor_bytes) == (1, 10, 2)


def test_a_rank_that_hangs_in_its_first_step_is_named_in_time() -> None:
    store = dist.HashStore()
    first, _, third = (Agreement(store, rank, 3, wait_s=0.05) for rank in range(3))
    first.publish(10, 2)
    third.publish(9, 2)
    with pytest.raises(StateError, match=r"rank 0 makes its plan .* but rank 1 has not: it hangs, has ended"):
        first.settle()


def test_a_rank_that_entered_is_seen_though_the_store_is_slow_with_what_is_set() -> None:
    # As TCPStore is: `set` returns once the value was sent, `add` once it was answered.
    class Slow(dist.HashStore):
        def __init__(self) -> None:
            super().__init__()
            self.under_way: list[tuple[str, str]] = []

        def set(self, key: str, value: str) -> None:
            self.under_way.append((key, value))

        def arrive(self) -> None:
            for key, value in self.under_way:
                super().set(key, value)

    store = Slow()
    first, second = (Agreement(store, rank, 2, wait_s=0) for rank in range(2))
    first.publish(10, 2)
    second.publish(9, 1)
    with pytest.raises(StateError, match="rank 1 has not"):  # waits for what is under way, and leaves nobody out
        first.settle()
    store.arrive()
    found = first.settle()
    assert found is not None
    assert found == second.settle()
    assert found.budget.rank == 1


def test_ranks_agree_on_a_first_step_whose_trace_has_got_its_communication_since(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Tensor("w", 8, TensorClass.PARAMETER, is_persistent=True)
    trace = Trace(tuple(Op(f"{n}", 1, reads=(0,), transient_bytes=4) for n in range(3)), (weight,))
    planned, _ = with_communication(trace, (("forward",), (Kind.GATHER, 0), (f"{OVER} {Kind.GATHER}", 0)))
    assert planned.communication and len(planned.tensors) > len(trace.tensors)
    store = dist.HashStore()
    monkeypatch.setattr("tieroff.session.rank_budget.agreement_here", lambda: Agreement(store, 0, 2, wait_s=0))
    own = RankBudget(0)
    own.enter()
    own.publish(trace, 100, 10)
    Agreement(store, 1, 2).publish(50, 20)
    assert own.settle(planned, 100, is_of_kind=True, may_raise=False).budget_bytes == 50
    other = replace(trace, tensors=(replace(weight, name="v"),))
    assert own.settle(other, 100, is_of_kind=True, may_raise=False).budget_bytes == 100  # a kind of step of its own


def test_a_rank_that_cannot_trace_its_step_leaves_and_is_not_counted() -> None:
    store = dist.HashStore()
    first, second = (Agreement(store, rank, 2, wait_s=0) for rank in range(2))
    first.publish(10, 2)
    second.leave()
    found = first.settle()
    assert found is not None
    assert (found.budget.budget_bytes, found.floor.floor_bytes) == (10, 2)
    assert second.settle() is None


def test_nothing_is_settled_before_this_rank_has_told() -> None:
    assert Agreement(dist.HashStore(), 0, 2, wait_s=0).settle() is None


def test_what_is_told_later_and_who_comes_later_change_nothing() -> None:
    store = dist.HashStore()
    first = Agreement(store, 0, 2, wait_s=0)
    first.publish(10, 2)
    found = first.settle()
    first.publish(1, 100)
    Agreement(store, 1, 2).publish(5, 50)
    assert first.settle() == found


def test_two_models_of_a_rank_do_not_meet() -> None:
    store = dist.HashStore()
    pairs = [[Agreement(store, rank, 2) for rank in range(2)] for _ in range(2)]
    for number, pair in enumerate(pairs):
        for agreement in pair:
            agreement.publish(10 + number, number)
    assert [pair[0].settle().budget.budget_bytes for pair in pairs] == [10, 11]  # type: ignore[union-attr]


@pytest.mark.parametrize("call", ["publish", "settle"])
def test_a_store_that_is_gone_is_an_error_that_says_so(call: str) -> None:
    class Gone(dist.HashStore):
        """Lost between two calls."""

        is_gone = False

        def set(self, key: str, value: str) -> None:
            if self.is_gone:
                raise dist.DistNetworkError("Connection reset by peer")
            super().set(key, value)

        def check(self, keys: list[str]) -> bool:
            if self.is_gone:
                raise dist.DistNetworkError("Connection reset by peer")
            return super().check(keys)

    store = Gone()
    agreement = Agreement(store, 0, 2)
    if call == "settle":
        agreement.publish(1, 1)
    store.is_gone = True
    with pytest.raises(StateError, match=r"could not reach the process group's store.*Connection reset"):
        agreement.publish(1, 1) if call == "publish" else agreement.settle()


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_agreement_works_over_every_kind_of_store(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        stores: list[dist.Store] = [dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
    else:
        server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        stores = [server, dist.TCPStore("127.0.0.1", server.port, 2, is_master=False, wait_for_workers=False)]
    found: dict[int, object] = {}

    def take_part(rank: int) -> None:
        agreement = Agreement(dist.PrefixStore("group", stores[rank]), rank, 2, wait_s=20)
        agreement.publish(10 - rank, rank)
        entered.wait(20)  # a rank that comes after the other has settled would not be seen by it
        found[rank] = agreement.settle()

    entered = threading.Barrier(2)
    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] == found[1] is not None
    assert found[0].budget.budget_bytes == 9  # type: ignore[attr-defined]


# -- what is said of failures ----------------------------------------------------------------------------------------------


def test_the_rank_that_was_killed_is_the_cause_and_not_the_peers_that_lost_it() -> None:
    assert first_cause({0: Failed(1, 100), 1: Failed(-9, 101), 2: Failed(-15, 101)}, {0: 100.9}) == 1
    assert first_cause({0: Failed(1, 100), 1: Failed(-9, 106)}, {0: 100.2}) == 0  # the agent killed it: it did not end


def test_of_two_errors_the_earlier_one_is_the_cause_however_the_ranks_ended() -> None:
    assert first_cause({0: Failed(1, 100), 1: Failed(1, 100)}, {0: 100.7, 1: 100.2}) == 1
    assert first_cause({0: Failed(1, 100), 1: Failed(-15, 101)}, {0: 100.7, 1: 100.2}) == 1
    assert first_cause({0: Failed(-6, 102), 1: Failed(1, 101)}, {1: 101.3}) == 1


def test_a_rank_that_was_only_stopped_is_no_cause_while_another_failed() -> None:
    assert first_cause({0: Failed(-15, 101), 1: Failed(1, 101)}, {}) == 1
    assert first_cause({0: Failed(-15, 101), 1: Failed(-15, 102)}, {}) == 0
    assert first_cause({}, {}) is None


def failed_launch(folder: Path) -> Path:
    for rank in range(2):
        rank_folder(folder, rank).mkdir()
    (rank_folder(folder, 1) / STDERR_FILE).write_text("first\nlast words\n")
    engine = {"model": "M", "device": "cpu", "steps": 2}
    write_json(rank_folder(folder, 0) / ACCOUNT_FILE, {"peak_bytes": 5, "engines": [engine]})
    return folder


def test_a_summary_says_why_and_where_to_look(tmp_path: Path) -> None:
    folder = failed_launch(tmp_path)
    outcome = summarize(folder, 2, {0: Failed(-15), 1: Failed(3)})
    assert outcome.exit_status == 1
    assert [row.status for row in outcome.ranks] == ["stopped", "failed"]
    assert outcome.ranks[1].reason == "exit status 3: last words"
    assert str(rank_folder(folder, 1) / STDERR_FILE) in outcome.error
    assert "rank 1 failed" in outcome.error
    assert as_lines(outcome)[0] == ("0", "stopped", "cpu", "M: none in 2 steps", "-", "5 B", "nothing")
    assert as_lines(outcome)[1][3] == "no model was wrapped"
    document = json.loads(json.dumps(as_document(outcome)))
    assert document["error"] == {"type": "LaunchError", "message": outcome.error}


def test_an_error_of_the_script_is_the_reason_and_a_long_one_is_cut(tmp_path: Path) -> None:
    folder = failed_launch(tmp_path)
    message = {"message": "ValueError: " + "x" * 9000, "extraInfo": {"time_s": 1.0}}
    write_json(rank_folder(folder, 1) / ERROR_FILE, {"message": message})
    reason = summarize(folder, 2, {1: Failed(1)}).ranks[1].reason
    assert reason.startswith("ValueError: xxx")
    assert len(reason) == 500


def test_an_error_that_torch_noted_is_the_reason(tmp_path: Path) -> None:
    """A script under torch's `@record` catches its error, and ends with a status of its own."""
    folder = failed_launch(tmp_path)
    error_file = rank_folder(folder, 1) / ERROR_FILE
    handler = ErrorHandler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
        handler.record_exception(ValueError("of the script"))
    outcome = summarize(folder, 2, {0: Failed(-15), 1: Failed(3)})
    assert outcome.ranks[1].reason == "ValueError: of the script"
    assert "rank 1 failed" in outcome.error
    for other in ('{"message": "in words"}', "[]", '{"mess'):
        error_file.write_text(other)
        assert summarize(folder, 2, {1: Failed(3)}).ranks[1].reason == "exit status 3: last words"


def test_a_signal_from_outside_stops_all(tmp_path: Path) -> None:
    outcome = summarize(failed_launch(tmp_path), 2, {}, "SIGINT")
    assert (outcome.exit_status, outcome.error) == (1, "ended by SIGINT: every rank was stopped")
    assert {row.status for row in outcome.ranks} == {"stopped"}


def test_a_launch_that_went_well_has_no_error(tmp_path: Path) -> None:
    outcome = summarize(failed_launch(tmp_path), 2, {})
    assert (outcome.exit_status, outcome.error) == (0, "")
    assert "error" not in as_document(outcome)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "account.json"
    assert read_json(path) is None
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Circular"):
        loop: list[object] = []
        loop.append(loop)
        write_json(path, loop)
    assert read_json(path) == {"a": 1}
