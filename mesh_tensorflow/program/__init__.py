"""What a program is before any layout: dimensions, scopes, graphs, operations, tensors."""
