"""Methods that hash keys and queries and read what collides: MagicPIG, KDEformer, Reformer."""
