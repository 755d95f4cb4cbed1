"""Measurements that are run by hand; none of them asserts anything about time."""
