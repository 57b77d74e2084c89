"""Protocols and enums for own stores and for the reading of statistics."""

from ebbtide._types import Block, Device, Reason, Store, StoreFactory, StoreStats, Stream, StreamEvent, Unable

__all__ = ["Block", "Device", "Reason", "Store", "StoreFactory", "StoreStats", "Stream", "StreamEvent", "Unable"]
