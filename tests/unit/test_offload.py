"""What a resting role gives up on the device comes back as it was, views and all."""

import pytest
import torch

from mppo.megatron.offload import OffloadedTensors

pytestmark = pytest.mark.unit


def test_storages_are_given_up_while_nobody_is_inside_and_come_back_as_they_were():
    buffer = torch.arange(6.0)
    parameter = buffer[2:5].view(3)
    offloaded = OffloadedTensors(lambda: [buffer, parameter])
    offloaded.offload()
    assert buffer.untyped_storage().nbytes() == 0
    assert offloaded.offloaded_bytes == 24
    with offloaded.onloaded():
        assert buffer.tolist() == [0, 1, 2, 3, 4, 5]
        assert offloaded.offloaded_bytes == 0
        parameter += 10
    assert buffer.untyped_storage().nbytes() == 0
    with offloaded.onloaded():
        assert buffer.tolist() == [0, 1, 12, 13, 14, 5]


def test_it_may_be_entered_again_and_leaves_with_the_last():
    tensor = torch.ones(3)
    offloaded = OffloadedTensors(lambda: [tensor])
    with offloaded.onloaded():
        with offloaded.onloaded():
            pass
        assert tensor.tolist() == [1, 1, 1]
    assert tensor.untyped_storage().nbytes() == 0


def test_what_is_only_read_is_not_copied_back():
    """Whoever writes has to say so: what is written by one who only reads is lost."""
    tensor = torch.ones(3)
    offloaded = OffloadedTensors(lambda: [tensor])
    offloaded.offload()
    with offloaded.onloaded(writes=False):
        tensor += 1
    with offloaded.onloaded(writes=False):
        assert tensor.tolist() == [1, 1, 1]
        with offloaded.onloaded():
            tensor += 5
    with offloaded.onloaded(writes=False):
        assert tensor.tolist() == [6, 6, 6]


def test_to_offload_what_rests_already_changes_nothing():
    tensor = torch.ones(3)
    offloaded = OffloadedTensors(lambda: [tensor])
    offloaded.offload()
    offloaded.offload()
    with offloaded.onloaded():
        assert tensor.tolist() == [1, 1, 1]


def test_host_memory_is_kept():
    """Pinning it takes longer than a copy."""
    tensor = torch.ones(3)
    offloaded = OffloadedTensors(lambda: [tensor])
    offloaded.offload()
    ((_, first),) = offloaded._host.values()
    with offloaded.onloaded():
        tensor += 1
    ((_, second),) = offloaded._host.values()
    assert second.data_ptr() == first.data_ptr()


def test_what_takes_the_place_of_a_tensor_is_copied_even_by_who_only_reads():
    tensors = [torch.ones(3)]
    offloaded = OffloadedTensors(lambda: tensors)
    offloaded.offload()
    with offloaded.onloaded(writes=False):
        tensors[0] = torch.full((3,), 4.0)
    with offloaded.onloaded(writes=False):
        assert tensors[0].tolist() == [4, 4, 4]


def test_without_keep_only_the_room_comes_back():
    gradients = torch.ones(4)
    offloaded = OffloadedTensors(lambda: [gradients], keep=False)
    offloaded.offload()
    with offloaded.onloaded():
        assert gradients.shape == (4,)
        assert gradients.untyped_storage().nbytes() == 16


def test_what_is_made_later_is_offloaded_too():
    tensors = [torch.ones(2)]
    offloaded = OffloadedTensors(lambda: tensors)
    with offloaded.onloaded():
        tensors.append(torch.full((3,), 7.0))
    assert tensors[1].untyped_storage().nbytes() == 0
    with offloaded.onloaded():
        assert tensors[1].tolist() == [7, 7, 7]


def test_an_error_inside_parks_all_the_same():
    tensor = torch.ones(3)
    offloaded = OffloadedTensors(lambda: [tensor])
    with pytest.raises(ValueError, match="inside"), offloaded.onloaded():
        raise ValueError("inside")
    assert tensor.untyped_storage().nbytes() == 0
