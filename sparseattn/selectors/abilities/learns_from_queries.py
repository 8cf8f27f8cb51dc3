"""Methods that learn from the prompt's queries."""

from __future__ import annotations


class LearnsFromQueries:
    """A method whose `append` wants queries of the prompt, so that a cache is given them with the rows.

    Attributes:
        queries_share: share of the rows whose queries `append` wants (`Rows.queries`), 0 none to 1 all. The cache keeps
            them until their rows are sealed, and each is G times a key; rows are sampled evenly, by position. Where
            several parts of a method learn, all see the largest share.
        last_queries: how many of the prompt's newest queries the first `append` wants (`Rows.last_queries`), 0 none. A
            part that wants fewer than another sees the same, of which its own are the last. With a `queries_share` of 1
            it is raised to all rows behind the sealed ones: then no query is missing but those of the sink's rows.
        learns_once: whether queries of sampled rows count for nothing once a sequence has sealed rows. As soon as every
            sequence has, the cache takes and keeps none, and later seals hand over none, if all parts learn once.
    """

    queries_share: float = 0.0
    last_queries: int = 0
    learns_once: bool = False
