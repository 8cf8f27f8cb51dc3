"""Methods that search a graph or another nearest-neighbour index: RetrievalAttention and its relatives."""
