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
