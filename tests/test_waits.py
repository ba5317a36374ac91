"""Every wait of a rank is registered with the watch, or can't last: a list of all of them, compared with the code.

MPI's blocking collectives are not in the list: transports call them within operations, and in what
`run_with_deadline` runs.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mpicoll

BLOCKING = {
    *("sleep", "sched_yield", "yield_core", "wait", "wait_for", "poll", "select", "acquire"),
    *("Wait", "Waitall", "Waitany", "Waitsome", "Probe", "Mprobe", "Recv", "Send", "Sendrecv"),
}
"""Names of what may wait, whatever it is called on."""

JOINED = ("thread", "keeper", "begin_free()")
"""What is joined, where it is a thread."""

ELSEWHERE = ("cli", "launch", "schedules", "transport/launcher.py", "engine/cuda_probes.py")
"""Programs that start jobs, which are no ranks themselves, those that such a job runs under its own time limit, and
schedules, whose Send and Recv are data."""

WAITS = {
    "registered: an entry of the watch's `active`, or the operation of a queue": {
        "collectives/repeated_messages.py::StartedMessage._wait_within",
        "collectives/transfers.py::Transfer._wait_pending",
        "collectives/window.py::Window._run_alone",
        "collectives/window.py::_wait",
        "engine/core/arena_wait.py::ArenaWait.pause",
        "engine/core/uninterrupted.py::call_uninterrupted",
        "engine/executors/compressed.py::_Exchange._wait",
        "engine/executors/hierarchical.py::HierarchicalPhases._await_first",
        "engine/executors/schedule.py::ScheduledOperation.finish",
        "engine/executors/schedule.py::ScheduledOperation.wait",
        "engine/executors/staging.py::StagedExchanger.exchange",
        "engine/executors/streamed.py::StreamedSchedule.fail",
        "engine/executors/streamed.py::StreamedSchedule.wait",
        "transport/local/posted_round.py::LocalRound.wait",
        "engine/executors/nccl.py::Nccl._wait",
        "engine/core/request.py::waitany",
        "parallel/p2p/progress.py::PipeProgress._sleep_until",
        "parallel/parameter_server/connection.py::Connection.wait",
        "parallel/parameter_server/transfers.py::PolledTransfers.pause",
        "transport/mpi/background_messages.py::MpiBackgroundMessage.wait",
        "engine/diagnostics/mailbox.py::Mailbox.take",
        "torch/group_operations.py::GroupOperations.run_monitored_barrier",
        "transport/waiting.py::Backoff.yield_core",
        "transport/waiting.py::Backoff.sleep",
        "transport/waiting.py::poll",
        "transport/mpi/pending.py::MpiPending.wait",
        "transport/mpi/fault_tolerance.py::FailureState.wait_all",
        "transport/mpi/transport.py::MpiTransport._is_common",
        "transport/mpi/user_comms.py::duplicate",
        "transport/mpi/fault_tolerance.py::FailureState.complete",
        "transport/mpi/connections.py::_exchange",
        "transport/mpi/messages.py::MessagePassing.exchange",
        "transport/mpi/messages.py::MessagePassing.probe",
        "transport/mpi/messages.py::MessagePassing.recv",
        "transport/mpi/messages.py::MessagePassing.send",
        "transport/mpi/messages.py::MessagePassing.sendrecv",
        "transport/mpi/pending.py::MpiPending.cancel",
        "transport/mpi/native.py::_bind_persistent",
        "transport/mpi/native.py::_bind_persistent.again",
    },
    "a wait for a request, a job or a work, which is registered itself": {
        "collectives/arguments.py::call_with_timeout",
        "collectives/call.py::call",
        "collectives/halo.py::exchange_halo",
        "collectives/neighbours.py::NeighbourOperation.wait",
        "collectives/repeated_messages.py::StartedMessage.wait",
        "collectives/neighbours.py::neighbor_allgather",
        "collectives/neighbours.py::neighbor_alltoall",
        "collectives/transfers.py::wait_with_timeout",
        "engine/plan.py::Plan.wait",
        "parallel/data_parallel/reducer.py::_resume",
        "engine/core/request.py::Request.wait",
        "engine/core/request.py::waitall",
        "parallel/gradients.py::_reduce",
        "parallel/p2p/default_pipe.py::wait",
        "parallel/parameter_server/checkpoint.py::load",
        "parallel/parameter_server/checkpoint.py::save",
        "parallel/parameter_server/server.py::ParameterServer._receive_initial_weights",
        "parallel/parameter_server/server.py::ParameterServer.update_model",
        "parallel/parameter_server/connection.py::Connection.close",
        "parallel/parameter_server/worker.py::Worker._receive",
        "parallel/parameter_server/worker.py::Worker._send_bucket",
        "parallel/parameter_server/worker.py::Worker.close",
        "parallel/parameter_server/worker.py::Worker.get_weights",
        "parallel/parameter_server/worker.py::Worker.pull_weights",
        "parallel/pipeline/engine.py::PipelineEngine._run_actions",
        "parallel/pipeline/engine.py::PipelineEngine._share_result",
        "torch/group_operations.py::GroupOperations.barrier",
        "torch/fast_messages.py::MessageWork.wait",
        "torch/sparse.py::all_reduce.run",
        "torch/work.py::RecvHandle._finish",
        "torch/work.py::CoalescedHandle.wait",
        "torch/work.py::DeviceHandle.wait",
        "torch/work.py::Work.block_current_stream",
        "torch/work.py::Work.exception",
        "torch/work.py::Work.result",
        "torch/work.py::Work.synchronize",
        "torch/work.py::Work.wait",
        "torch/work.py::_Future.wait",
    },
    "of what has completed already": {
        "parallel/p2p/message_format.py::BroadcastTransport.iprobe",
        "parallel/p2p/message_format.py::_PendingBroadcast.test",
    },
    "bounded by the program, or by seconds": {
        "engine/diagnostics/late_imports.py::prevent_imports",
        "engine/diagnostics/process_exit.py::call_within",
        "engine/diagnostics/process_exit.py::end_by_signal",
        "engine/diagnostics/deaths.py::DeathHandler.report_ended",
        "engine/diagnostics/watchdog.py::Watchdog.leave",
        "transport/mpi/connections.py::_accept",
        "transport/mpi/connections.py::_dial",
        "transport/mpi/session.py::_ExitAgreement.reach",
        "engine/executors/nccl.py::Nccl.abort",
        "engine/executors/nccl.py::Nccl.free",
        "engine/executors/nccl.py::free_all",
        "engine/core/message_check.py::unmatched_messages",
        "engine/core/message_progress.py::_stop",
        "engine/core/poller.py::Poller.stop",
        "engine/core/queue.py::OperationQueue._wait_within",
        "engine/core/queue.py::OperationQueue.drain",
        "engine/executors/peer_messages.py::PeerMessages.drain",
        "engine/executors/stream_order.py::StreamOrder._try",
        "engine/executors/stream_order.py::SubmittedCollectives.drain",
        "engine/tracing/recorder.py::Recorder.stop",
        "engine/tracing/recorder.py::Recorder.flush",
        "engine/tracing/session.py::TraceSession._compare_clocks",
        "engine/tracing/session.py::TraceSession._collect_parts",
        "engine/tracing/session.py::TraceSession._receive_chunks",
        "engine/tracing/session.py::TraceSession._send_command",
        "engine/tracing/session.py::TraceSession._send_part",
        "engine/tracing/session.py::TraceSession._run_commands",
        "engine/tracing/session.py::TraceSession.finish",
        "engine/diagnostics/abort.py::JobAbort.announce",
        "engine/diagnostics/reporter.py::Reporter.request",
        "parallel/p2p/progress.py::PipeProgress._wait_until",
        "parallel/parameter_server/links.py::_spin",
        "transport/mpi/background_messages.py::MpiBackgroundQueue.pause",
        "torch/callback_comms.py::CallbackComms.drain",
        "transport/control/address_choice.py::_connect_to",
        "transport/control/network.py::ControlNetwork.flush",
        "transport/mpi/fault_tolerance.py::FailureState.rank_failed",
        "transport/mpi/fault_tolerance.py::FailureState.has_failed",
        "transport/mpi/transport.py::MpiTransport.wait_for_all_ranks",
        "transport/mpi/session.py::abort",
        "transport/control/process_status.py::Process.status",
        "transport/waiting.py::wait_for",
    },
    "a device, bounded by the timeout of the communicator; or a stream, not the host": {
        "engine/dispatch.py::_block_callers",
        "engine/executors/stream_order.py::Completion.wait",
        "engine/executors/stream_order.py::StreamOrder._wait_for_others",
        "engine/executors/stream_order.py::StreamOrder.begin",
        "engine/executors/stream_order.py::StreamOrder.submit",
        "engine/executors/stream_order.py::complete_or_defer",
    },
    "a lock that is held for moments, or is not waited for": {
        "engine/core/queue.py::OperationQueue.abandon",
        "engine/executors/stream_order.py::SubmittedCollectives._sweep",
        "engine/core/queue.py::OperationQueue.make_progress",
        "torch/work.py::RecvHandle.test",
        "transport/control/network.py::ControlNetwork._before_fork",
        "transport/control/network.py::ControlNetwork._post",
        "transport/control/network.py::ControlNetwork.poll",
        "transport/mpi/pending.py::MpiPending.test",
    },
    "the lock of a queue, whose holder runs an operation that the watch knows": {
        "extension.py::PythonQueueLock.__enter__",
    },
    "a thread of ours that has nothing to do": {
        "engine/executors/stream_order.py::_Monitor._run",
        "transport/mpi/session.py::_ExitAgreement._run",
        "engine/core/poller.py::Poller._run",
        "engine/core/queue.py::OperationQueue._run_worker",
        "engine/tracing/recorder.py::Recorder._run",
        "torch/callback_comms.py::CallbackQueue._run_callbacks",
        "torch/work.py::_Future.add_done_callback.call",
        "torch/work.py::_Future.then.call",
    },
    "the watch itself": {
        "engine/diagnostics/peers.py::Peers.collect_states",
        "engine/diagnostics/watchdog.py::Watchdog._run",
        "engine/diagnostics/signals.py::SignalMonitor._handle_events",
        "engine/diagnostics/watchdog.py::Watchdog._wait",
        "transport/control/network.py::ControlNetwork._turn",
    },
    "ranks without MPI: bounded by the timeout of the communicator, or by seconds": {
        "transport/tcp/mesh.py::Mesh.leave",
        "transport/tcp/mesh.py::Mesh.send",
        "transport/tcp/rendezvous.py::_Acceptor.wait",
        "transport/tcp/rendezvous.py::connect",
        "transport/tcp/messages.py::TcpPending.cancel",
        "transport/tcp/messages.py::TcpPending.wait",
        "transport/tcp/messages.py::MessagePassing._await_all",
        "transport/tcp/messages.py::MessagePassing._send",
        "transport/tcp/messages.py::MessagePassing.probe",
        "transport/tcp/messages.py::MessagePassing.wait",
        "transport/tcp/messages.py::_wait_or_withdraw",
    },
    "ranks that are threads of one process: bounded by the timeout of run_local": {
        "engine/run_local.py::_run_all",
        "transport/local/transport.py::LocalPending.cancel",
        "transport/local/transport.py::LocalPending.wait",
        "transport/local/transport.py::LocalTransport._wait_or_withdraw",
        "transport/local/transport.py::LocalTransport.exchange",
        "transport/local/transport.py::LocalTransport.probe",
        "transport/local/job.py::LocalJob.agree",
        "transport/local/job.py::LocalJob.exchange",
        "transport/local/job.py::LocalJob.wait",
    },
}


class _Finder(ast.NodeVisitor):
    """The functions that call, or take along, something that may wait."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: set[str] = set()
        self._path: list[str] = []

    def _enter(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()

    visit_FunctionDef = visit_ClassDef = _enter  # noqa: N815  names that ast looks for

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        on = ast.unparse(called.value).lower() if isinstance(called, ast.Attribute) else ""
        if name in BLOCKING or (name == "join" and on.endswith(JOINED)):
            self.found.add(f"{self.file}::{'.'.join(self._path)}")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        # MPI's calls are also passed on, to be called elsewhere.
        if node.attr in BLOCKING and node.attr[0].isupper():
            self.found.add(f"{self.file}::{'.'.join(self._path)}")
        self.generic_visit(node)


@pytest.mark.slow
def test_all_waits_are_known() -> None:
    package = Path(mpicoll.__file__).parent
    found: set[str] = set()
    for path in package.rglob("*.py"):
        file = path.relative_to(package).as_posix()
        if not file.startswith(ELSEWHERE):
            finder = _Finder(file)
            finder.visit(ast.parse(path.read_text()))
            found |= finder.found
    known = set().union(*WAITS.values())
    assert sum(map(len, WAITS.values())) == len(known)
    assert found - known == set(), "a new wait: register it with the watch, or say here why it can't last"
    assert known - found == set(), "these don't wait any more"
