"""Data that comes in shards: files, parts of files, streams; see :class:`ShardQueue` and the readers."""

from elastic_train.shards.queue import ShardQueue
from elastic_train.shards.readers import BinaryRecords, Iterables, NpyRecords, Reader, TextLines

__all__ = ["BinaryRecords", "Iterables", "NpyRecords", "Reader", "ShardQueue", "TextLines"]
