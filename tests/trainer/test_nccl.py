"""What differs with NCCL, on a simulated GPU: a gloo group of this process alone takes NCCL's place."""

import pytest
import ranks
import torch
import torch.distributed as dist

from common.console import console
from common.exits import AGAIN
from common.settings import UserError
from runtime.distributed import join_world


@pytest.fixture
def calls(monkeypatch, launched):
    """The calls to torch.distributed that NCCL would see."""
    made = []
    init, destroy = dist.init_process_group, dist.destroy_process_group

    def fake_init(backend, device_id=None, **kwargs):
        made.append((backend, device_id))
        init("gloo", **kwargs)

    def fake_destroy():
        made.append("destroyed")
        destroy()

    launched(1, ranks.free_port())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", fake_init)
    monkeypatch.setattr(dist, "destroy_process_group", fake_destroy)
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda group: made.append("aborted"))
    yield made
    if dist.is_initialized():
        destroy()
    console.quiet = False


def join_and_raise(error=None):
    with join_world(torch.device("cuda")) as world:
        assert world.device == torch.device("cuda", 0)
        if error is not None:
            raise error


BEGUN = ("nccl", torch.device("cuda", 0))


def test_a_group_knows_its_gpu_and_ends_after_all_operations(calls):
    join_and_raise()
    assert calls == [BEGUN, "destroyed"]


@pytest.mark.parametrize("error", [UserError("a full disk"), RuntimeError("a mistake"), MemoryError()], ids=repr)
def test_a_process_that_fails_does_not_wait_for_operations_that_the_others_may_never_begin(calls, error):
    with pytest.raises(type(error)):
        join_and_raise(error)
    assert calls == [BEGUN, "aborted"]


@pytest.mark.parametrize(
    "message",
    [
        "NCCL error in: /c10d/NCCLUtils.cpp:77, remote process exited or there was a network error\nncclRemoteError: A",
        "NCCL communicator was aborted on rank 1.",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=19, OpType=ALLREDUCE, Timeout(ms)=60000) ran",
        "[1] is setting up NCCL communicator, but store->get('0') got error: Connection reset by peer",
    ],
)
def test_nor_does_a_process_that_has_lost_another(calls, capsys, message):
    with pytest.raises(SystemExit) as stopped:
        join_and_raise(dist.DistBackendError(message))
    assert stopped.value.code == AGAIN
    assert calls == [BEGUN, "aborted"]


@pytest.mark.parametrize(
    "message",
    [
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        "ncclSystemError: System call or external library call failed or device error.\nLast error:\nNo space left",
    ],
)
def test_an_error_of_nccl_that_is_its_own_is_no_loss_of_another_process(calls, capsys, message):
    """A scheduler must not start it again."""
    with pytest.raises(dist.DistBackendError):
        join_and_raise(dist.DistBackendError(message))
    assert calls == [BEGUN, "aborted"]
    assert capsys.readouterr().err == ""


def test_a_stop_that_all_processes_agreed_on_is_no_failure(calls):
    with pytest.raises(SystemExit):
        join_and_raise(SystemExit(AGAIN))
    assert calls == [BEGUN, "destroyed"]
