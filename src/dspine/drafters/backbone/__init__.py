"""What every drafter of the family has: weights, context K/V, the block's layers, the chain."""
