"""What queries give to rows: softmax weights, summed over the queries of a KV head."""
