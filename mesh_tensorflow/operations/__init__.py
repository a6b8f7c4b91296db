"""Operation families. Each file holds one: shape rule, gradient, lowering, split behaviour."""
