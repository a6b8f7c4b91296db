"""Programs before any layout: dimensions, scopes, graphs, operations, tensors."""
