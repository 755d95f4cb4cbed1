"""Estimators work on the device where their inputs are: none makes a tensor on the host and mixes the two."""

import pytest

from mppo.algorithm.advantages import ESTIMATORS

pytestmark = pytest.mark.distributed


def test_every_estimator_works_where_its_inputs_are(run_on_pretended_gpu):
    found = run_on_pretended_gpu("estimators")
    assert found.pop("mixed") == "AssertionError: aten::add got a tensor of the host and one of cuda"
    assert found == dict.fromkeys(ESTIMATORS.names())
