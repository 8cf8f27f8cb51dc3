"""Methods made of other methods: two stages, top-p, tails, reuse over layers."""
